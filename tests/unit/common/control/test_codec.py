"""Whatever is received becomes a checked message or a `ProtocolError`, never another exception."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from common.base.errors import ProtocolError
from common.base.message_types import fail_fast
from common.control import codec
from common.control.codec import (
    MAX_MESSAGES,
    check,
    decode,
    encode,
    join,
    split,
    unpack,
)
from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    Adapter,
    AttemptFailed,
    AttemptKey,
    AttemptStats,
    DecodeRequest,
    EngineRequest,
    Grant,
    ModelInfo,
    NodeLoad,
    NodeRecord,
    Offer,
    PeerRef,
    Ping,
    Pong,
    PrefillDone,
    PrefillRequest,
    SamplingParams,
    TokenBatch,
    TokenChunk,
    TokenLogprobs,
    TransferAbort,
    TransferReceived,
)
from common.control.pooling import PoolInput, PoolRequest, PoolResult
from common.control.versions import OURS, PROTOCOL_VERSION
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec

KEY = AttemptKey("r", 2)
PEER = PeerRef("n", "i", "tcp://127.0.0.1:1", ["tcp://127.0.0.1:2"])
LAYOUT = KVLayout("f", KVSpec.uniform(3, 2, 64, "bfloat16"), tp_size=2, pp_layers=(1, 2))
SAMPLING = SamplingParams(seed=2**63, max_tokens=4, stop_token_ids=[1], logprobs=0)
MESSAGES = [
    PrefillRequest(KEY, EngineRequest(pack_ids([1]), SAMPLING, "salt"), pack_ids([2]), PEER, 1.5),
    DecodeRequest(KEY, EngineRequest(pack_ids([1, 2]), SAMPLING, adapter=Adapter("a", "00")), pack_ids(), None, 1.5),
    PoolRequest(KEY, [PoolInput(pack_ids([1, 2])), PoolInput(pack_ids([1, 2, 3]), 2)], False, 8, True, 1.5),
    PoolResult(KEY, [b"\x00" * 8, b""]),
    Abort(KEY),
    Ping("router", 3.0),
    Pong("n", "i", NodeLoad(running=1)),
    TokenBatch([TokenChunk(KEY, 0, [5], [TokenLogprobs(-0.5, [5, 6], [-0.5, -1.0])], "stop", AttemptStats(16))]),
    AttemptFailed(KEY, "code", "message"),
    Offer(KEY, PEER, LAYOUT, 17, b"b" * 16),
    Grant(KEY, PEER, LAYOUT, [1], [pack_ids([4, 2])]),
    PrefillDone(KEY, 7),
    TransferReceived(KEY, 10),
    TransferAbort(KEY, "code", "message"),
    NodeRecord(
        "prefill",
        PEER,
        ModelInfo("m", "/m", 10, 20, "d", "embed", 384),
        LAYOUT,
        100,
        1.0,
        adapters=[Adapter("a", "00")],
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: object) -> None:
    assert decode(encode(message)) == message  # type: ignore[arg-type]


def test_a_record_of_a_node_that_runs_nothing_is_refused() -> None:
    [record] = [each for each in MESSAGES if isinstance(each, NodeRecord)]
    with pytest.raises(ProtocolError, match="max_num_seqs"):
        decode(encode(replace(record, max_num_seqs=0)))


@pytest.mark.parametrize("count", [0, 1, 15, 16, MAX_MESSAGES])
def test_a_frame_holds_several_messages(count: int) -> None:
    frame = join([encode(Abort(AttemptKey("r", number))) for number in range(count)])
    assert [check(envelope) for envelope in split(frame)] == [Abort(AttemptKey("r", number)) for number in range(count)]


def test_a_frame_of_too_many_messages_is_refused() -> None:
    with pytest.raises(ProtocolError, match="1025 messages in one frame"):
        split(join([encode(Ping("r", 0.0))] * (MAX_MESSAGES + 1)))


def test_a_list_of_wrong_items_costs_one_error() -> None:
    """A report about each of them once took minutes and gigabytes."""
    body = {"chunks": [[["r", 1], 0, [None] * 200_000]]}
    with pytest.raises(ValidationError) as caught:
        codec._CODEC._validators["TokenBatch"].validate_python(body)
    assert len(caught.value.errors(include_input=False)) == 1


@pytest.mark.parametrize("name", ["DecodeRequest", "TokenBatch", "Grant", "PoolRequest", "NodeRecord"])
def test_every_list_of_a_message_is_left_at_its_first_wrong_item(name: str) -> None:
    def lists(schema: object) -> list[dict[str, object]]:
        if isinstance(schema, dict):
            own = [schema] if schema.get("type") == "list" else []
            return own + [found for part in schema.values() for found in lists(part)]
        return [found for part in schema for found in lists(part)] if isinstance(schema, list) else []

    [message] = [type(each) for each in MESSAGES if type(each).__name__ == name]
    found = lists(fail_fast(TypeAdapter(message).core_schema))
    assert found
    assert all(each["fail_fast"] for each in found)


def test_what_is_quoted_of_a_malformed_message_is_short() -> None:
    for body in ({"k" * 10_000: 1}, "x" * 10_000, [1] * 10_000):
        for name in ("Pong", "Ping", "y" * 10_000):
            with pytest.raises(ProtocolError) as caught:
                check([PROTOCOL_VERSION, name, body])
            assert len(caught.value.message) < 600
    with pytest.raises(ProtocolError) as caught:
        check(["9" * 10_000, "Ping", None])
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91", msgpack.packb("x"), msgpack.packb({1: 2}), b"\x90\x90"])
def test_bytes_that_are_not_a_frame_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        split(frame)


def test_a_frame_of_an_older_version_is_refused_with_both_versions_named() -> None:
    with pytest.raises(ProtocolError, match=f"theirs is 2, ours is {OURS}"):
        split(msgpack.packb([2, "Ping", {"router_id": "r", "lease_s": 3.0}]))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    st.sampled_from([type(message).__name__ for message in MESSAGES]),
)
def test_random_bodies_are_refused(body: object, name: str) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([PROTOCOL_VERSION, name, body]))


def test_another_version_is_refused_with_both_versions_named() -> None:
    with pytest.raises(ProtocolError, match=f"theirs is 99, ours is {OURS}"):
        decode(msgpack.packb([99, "Abort", {"key": {"request_id": "r", "attempt": 1}}]))


@pytest.mark.parametrize("changed", [{"dtype": "float64"}, {"tp_size": 0}, {"num_kv_heads": 0}, {"pp_layers": [9]}])
def test_values_that_a_message_itself_refuses_are_protocol_errors(changed: dict[str, object]) -> None:
    version, name, body = msgpack.unpackb(encode(Offer(KEY, PEER, LAYOUT, 17, b"a" * 16)))
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([version, name, {**body, "layout": {**body["layout"], **changed}}]))


def test_a_number_out_of_range_is_a_protocol_error_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError):
        encode(AttemptFailed(AttemptKey("r", 10**30), "code", "message"))


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"malformed Abort: key\.extra"):
        decode(msgpack.packb([PROTOCOL_VERSION, "Abort", {"key": {"request_id": "r", "attempt": 1, "extra": 1}}]))


def test_an_unknown_type_is_refused_and_not_echoed_at_length() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb([PROTOCOL_VERSION, "X" * 10_000, {}]))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("path", "size"),
    [
        (("layout", "spec", "groups", 0, "num_heads"), 10**12),
        (("layout", "spec", "groups", 0, "layers"), [10**12]),
        (("layout", "spec", "groups", 0, "planes", 0, "width"), 10**12),
        (("layout", "spec", "block_size"), 10**12),
        (("layout", "tp_size"), 2 * 10**12),
        (("layout", "pp_layers"), [10**12]),
    ],
    ids=str,
)
def test_sizes_beyond_every_model_are_refused_at_once(path: tuple[str | int, ...], size: object) -> None:
    """A record of 286 bytes once stopped a router, a node and `kvrelay up` for good."""
    for message in (MESSAGES[-1], next(each for each in MESSAGES if isinstance(each, Offer))):
        envelope = msgpack.unpackb(encode(message))  # type: ignore[arg-type]
        place = envelope[2]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = size
        with pytest.raises(ProtocolError):
            check(envelope)


@pytest.mark.parametrize("filling", [b"\x90", b"\x80", b"\xc7\x00\x05", b"\xd4\x05a"])
def test_small_parts_that_take_many_times_their_size_are_refused_early(filling: bytes) -> None:
    many = 2**17
    frame = b"\x92" + 2 * (b"\xdd" + many.to_bytes(4, "big") + filling * many)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"too many lists|ext"):
            unpack(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 25 * len(frame)
