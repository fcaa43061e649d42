"""No frame of a control link takes many times its size in memory, and no message of ours is refused for its size."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.base.errors import ProtocolError
from common.control.codec import MAX_MESSAGE_BYTES, check, encode, join, split
from common.control.identities import AttemptKey, PeerRef, pack_ids
from common.control.item_count import SMALL_BYTES, check_item_count
from common.control.messages import (
    DecodeRequest,
    EngineRequest,
    Grammar,
    Grant,
    Message,
    PrefillRequest,
    SamplingParams,
)
from common.control.pooling import PoolInput, PoolRequest
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec

KEY = AttemptKey("r", 2)
PEER = PeerRef("n", "i", "tcp://127.0.0.1:1", ["tcp://127.0.0.1:2"])
SAMPLING = SamplingParams(seed=0, max_tokens=1)
LAYOUT = KVLayout("f", KVSpec.uniform(3, 2, 64, "bfloat16"), tp_size=2, pp_layers=(1, 2))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=30,
    ),
)
def test_whatever_message_pack_writes_is_read_to_its_end(value: object) -> None:
    """A count that lost its place would refuse good frames, or miss items."""
    check_item_count(msgpack.packb([b"x" * SMALL_BYTES, value]))
    with pytest.raises(ProtocolError, match="too many items"):
        check_item_count(msgpack.packb([b"x" * SMALL_BYTES, value, [None] * 9000]))


@given(st.binary(max_size=300))
def test_what_is_no_message_pack_ends_the_count_or_is_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        check_item_count(b"\x92\xc5" + SMALL_BYTES.to_bytes(2, "big") + bytes(SMALL_BYTES) + data)


@pytest.mark.parametrize("size", [SMALL_BYTES + 1, 100_000, MAX_MESSAGE_BYTES])
@pytest.mark.parametrize(
    "items",
    [
        b"\x90",
        b"\x80",
        b"\xc0",
        b"\xcd\xff\xff",
        b"\xa2ab",
        b"\xc4\x02ab",
        b"\xcb" + bytes(8),
        b"\x93\x91\xa1a\x90\x81\xa1b\xc0",
    ],
    ids=bytes.hex,
)
@pytest.mark.parametrize("depth", [1, 400])
def test_no_frame_takes_four_times_its_size_or_two_megabytes(items: bytes, size: int, depth: int) -> None:
    """As many items as fit, in one list or in nested ones, with or without a long text that makes the frame large."""
    head = b"\xdd" + (size // depth // len(items)).to_bytes(4, "big")
    many = b"\x91" + (head + items * (size // depth // len(items) - 1)) * depth + b"\x90"
    few = size // 300 + 8000
    beside = b"\x92\xdd" + few.to_bytes(4, "big") + items * few
    beside += b"\xdb" + max(0, size - len(beside) - 5).to_bytes(4, "big") + b"a" * max(0, size - len(beside) - 5)
    for frame in (many, beside):
        tracemalloc.start()
        try:
            with contextlib.suppress(ProtocolError):
                for envelope in split(frame):
                    check(envelope)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < max(4 * len(frame), 2 * 2**20)


LONG = pack_ids(range(2**20 - 400, 2**21 - 400))
"""Token ids of a prompt that is as long as a frame allows."""
LARGE_MESSAGES = [
    PrefillRequest(KEY, EngineRequest(LONG, SAMPLING), LONG[:400_000], PEER, 1.5),
    DecodeRequest(KEY, EngineRequest(LONG, SAMPLING._replace(allowed_token_ids=LONG[:262_144])), pack_ids(), None, 1.5),
    DecodeRequest(
        KEY,
        EngineRequest(
            LONG[:200],
            SAMPLING._replace(
                logit_bias=[(token, 0.5) for token in range(1024)],
                bad_words=[LONG[:256]] * 256,
                stop_token_ids=list(range(70_000, 70_128)),
                grammar=Grammar("x" * 2**20),
            ),
        ),
        pack_ids(),
        None,
        1.5,
    ),
    Grant(KEY, PEER, LAYOUT, [1] * 4, [LONG[:62_500]] * 4),
    PoolRequest(KEY, [PoolInput(LONG[:8192])] * 128),
]


@pytest.mark.parametrize("message", LARGE_MESSAGES, ids=lambda message: type(message).__name__)
def test_the_largest_messages_pass_and_take_less_than_four_times_their_size(message: Message) -> None:
    frame = join([encode(message)])
    assert SMALL_BYTES < len(frame) <= MAX_MESSAGE_BYTES
    tracemalloc.start()
    try:
        [envelope] = split(frame)
        assert check(envelope) == message
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(frame)
