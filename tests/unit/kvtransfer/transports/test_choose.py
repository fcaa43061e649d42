"""Which transport a pair of ranks uses, and that one receiver serves several at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import transports
from support.mock_clock import MockClock
from support.transfer_harness import Rank, Recorder, layout, wait_until

from common.base.errors import ConfigError, HandshakeRefused, PeerLost
from common.config.service_configs import DecodeConfig
from common.control.messages import AttemptKey
from common.engine.kv_transfer import AbortOrder, SourceReleased
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer import factory
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports import same_host
from kvtransfer.transports.choose import (
    FORGET_AFTER_S,
    TransportFailures,
    TransportOffer,
    choose,
    parse_offers,
)
from kvtransfer.transports.collective.listener import CollectiveListener
from kvtransfer.transports.same_host import host_id
from kvtransfer.transports.shm import ring
from kvtransfer.transports.shm.connector import ShmConnector
from kvtransfer.transports.shm.listener import ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

ZMQ = TransportOffer("zmq", "tcp://10.0.0.1:1")
SHM = TransportOffer("shm", "unix://host-a/name", "host-a")
GLOO = TransportOffer("gloo", "tcp://10.0.0.1:2")
NCCL = TransportOffer("nccl", "tcp://10.0.0.1:3")


def on_gpu(gpu_id: str, host: str = "host-a") -> list[TransportOffer]:
    """The offers of a rank with its KV on a GPU."""
    return [
        ZMQ,
        TransportOffer("shm", f"unix://{host}/name", host),
        TransportOffer("cuda_ipc", f"unix://{host}/other", host, gpu_id),
        TransportOffer("nccl", "tcp://10.0.0.1:3", gpu_id=gpu_id),
    ]


@pytest.mark.parametrize(
    ("src", "dst", "wanted", "taken", "why"),
    [
        ([ZMQ, SHM], [ZMQ, SHM], "auto", "shm", "one host"),
        ([ZMQ, TransportOffer("shm", host_id="host-b")], [ZMQ, SHM], "auto", "zmq", "not on one host"),
        ([ZMQ, NCCL], [ZMQ, NCCL], "auto", "nccl", "CUDA"),
        ([ZMQ, NCCL], [ZMQ, SHM], "auto", "zmq", "nothing faster"),
        ([ZMQ, SHM, GLOO], [GLOO], "auto", "gloo", "nothing faster"),
        ([ZMQ, SHM], [ZMQ, SHM], "zmq", "zmq", "asked for zmq"),
        ([ZMQ, GLOO], [ZMQ, GLOO], "collective", "gloo", "asked for collective"),
        ([NCCL, GLOO], [ZMQ, NCCL, GLOO], "collective", "nccl", "CUDA"),
        (on_gpu("A"), on_gpu("A"), "auto", "cuda_ipc", "CUDA"),
        (on_gpu("A"), on_gpu("B"), "auto", "cuda_ipc", "CUDA"),
        (on_gpu("A"), on_gpu("B", "host-b"), "auto", "nccl", "not on one host"),
        (on_gpu("A"), [ZMQ, SHM], "auto", "shm", "one host"),
        ([ZMQ, SHM], on_gpu("A", "host-b"), "auto", "zmq", "not on one host"),
        (on_gpu("A"), on_gpu("A"), "shm", "shm", "asked for shm"),
    ],
)
def test_first_transport_that_both_ranks_can_use_is_chosen(
    src: list[TransportOffer], dst: list[TransportOffer], wanted: str, taken: str, why: str
) -> None:
    choice = choose(src, dst, wanted)
    assert choice.offer.transport == taken
    assert choice.offer in dst
    assert why in choice.why


@pytest.mark.parametrize(
    ("failed", "wanted", "taken", "why"),
    [
        ({"shm": "no such name"}, "auto", "zmq", "shm failed: no such name"),
        ({"shm": "no such name"}, "shm", "shm", "asked for shm"),
        ({"shm": "no such name", "zmq": "gone"}, "auto", "shm", "one host"),
    ],
)
def test_failed_transport_is_avoided_while_another_is_left(
    failed: dict[str, str], wanted: str, taken: str, why: str
) -> None:
    choice = choose([ZMQ, SHM], [ZMQ, SHM], wanted, failed)
    assert choice.offer.transport == taken
    assert why in choice.why


@pytest.mark.parametrize(
    ("other_gpu", "taken", "why"),
    [("A", "shm", "NCCL refuses two ranks on one GPU"), ("B", "nccl", "no peer access")],
)
def test_gpus_that_cannot_share_memory_use_nccl_or_else_pinned_memory(other_gpu: str, taken: str, why: str) -> None:
    choice = choose(on_gpu("A"), on_gpu(other_gpu), "auto", {"cuda_ipc": "no peer access"})
    assert choice.offer.transport == taken
    assert why in choice.why


@pytest.mark.parametrize(
    ("src", "dst", "wanted"),
    [
        (on_gpu("A"), on_gpu("A", "host-b"), "cuda_ipc"),
        (on_gpu("A"), on_gpu("A"), "collective"),
        ([ZMQ], [GLOO], "auto"),
        ([], [ZMQ], "auto"),
        ([ZMQ, SHM], [ZMQ], "shm"),
        ([TransportOffer("shm", host_id="host-b")], [SHM], "shm"),
        ([GLOO], [NCCL], "collective"),
    ],
)
def test_nothing_in_common_is_refused_with_the_offers_of_both_ranks(
    src: list[TransportOffer], dst: list[TransportOffer], wanted: str
) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        choose(src, dst, wanted)
    for offer in [*src, *dst]:
        assert offer.transport in refused.value.message


@given(st.lists(st.sampled_from([ZMQ, SHM, GLOO, NCCL, *on_gpu("GPU-5e1c-77")]), unique=True))
def test_offers_are_parsed_from_their_own_address(offers: list[TransportOffer]) -> None:
    assert parse_offers(" ".join(map(str, offers))) == offers


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:1", "zmq", "zmq+", "zmq+tcp://", "+tcp://a:1", "zmq+tcp://a:1 x"])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(HandshakeRefused):
        parse_offers(address)


def test_transport_of_a_later_version_is_ignored() -> None:
    assert choose([ZMQ], parse_offers("rdma+ib://x zmq+tcp://10.0.0.1:1")).offer.transport == "zmq"


def test_host_id_is_stable_and_reveals_nothing_about_the_host() -> None:
    assert host_id() == host_id()
    assert "/" not in (host_id() or "")
    assert " " not in (host_id() or "")


def even_ranks_share_memory() -> transports.Transport:
    """Even ranks of the source may share memory with the destination, odd ranks may not."""

    def sender(storage: KVStorage, kv: KVLayout, rank: int, on_event: Recorder, **kw: Any) -> TransferEnd:
        connectors: list[Any] = [ZmqConnector(), *([] if rank % 2 else [ShmConnector()])]
        return TransferEnd(storage, kv, rank, on_event, connectors, incarnation="src-1", min_message_bytes=1, **kw)

    def receiver(*where: Any, **kw: Any) -> TransferEnd:
        return TransferEnd(*where, [], [ZmqListener("127.0.0.1", 0), ShmListener()], incarnation="dst-1", **kw)

    return transports.Transport(sender, receiver)


def moved(rank: Rank) -> dict[str, int]:
    """Bytes of the attempts that have ended at a rank, by transport."""
    found: Counter[str] = Counter()
    for event in rank.recorder.events:
        for part in getattr(event, "traffic", ()):
            found[part.transport] += part.size_bytes
    return found


@pytest.fixture
def make() -> Iterator[Any]:
    with transports.clusters(even_ranks_share_memory) as make:
        yield make


def test_slices_of_one_attempt_arrive_over_two_transports(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = make(layout(tp=2), layout(tp=1))
    for i in range(3):
        cluster.transfer(f"r{i}", tokens=27, seed=i).run()
    half = 3 * 7 * cluster.dst_layout.spec.bytes_per_block // 2
    assert moved(cluster.receivers[0]) == {"zmq": half, "shm": half}
    assert moved(cluster.senders[0]) == {"shm": half}
    assert moved(cluster.senders[1]) == {"zmq": half}
    said = sorted(r.getMessage() for r in caplog.records if " over " in r.getMessage())
    assert [" over shm: " in said[0], " over zmq: " in said[1], len(said)] == [True, True, 2], "once for each pair"


def test_equal_host_ids_on_different_hosts_fall_back_to_zmq_at_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As with clones of one virtual machine: all ids are equal, but no memory is shared."""
    caplog.set_level(logging.INFO)
    cluster = make(layout(), layout())
    receiver = cluster.receivers[0].end
    receiver.address = receiver.address.replace("/kvrelay-", "/kvrelay-elsewhere-")
    cluster.transfer("r", tokens=27).run()
    assert "shm" not in moved(cluster.receivers[0])
    [said] = [r.getMessage() for r in caplog.records if " over " in r.getMessage()]
    assert " over zmq: " in said
    assert "shm failed" in said


def test_transport_that_breaks_before_its_first_ack_is_avoided_afterwards(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver cannot map the memory and disconnects: that attempt fails, the next one uses another transport."""

    def cannot(*_: Any) -> Any:
        raise OSError("no memory left")

    cluster = make(layout(), layout())
    monkeypatch.setattr(ring, "accept", cannot)
    transfer = cluster.transfer("r", tokens=27)
    transfer.open_senders()
    transfer.grant()
    transfer.final()
    sender = cluster.senders[0].end
    wait_until(
        lambda: "shm" in sender._send.connections._failures.of(cluster.receivers[0].end.address, 0.0),
        "the sender remembers the failure",
    )
    cluster.transfer("r", attempt=2, tokens=27).run()
    assert "shm" not in moved(cluster.receivers[0])


def test_transport_that_takes_messages_and_never_acknowledges_is_avoided_afterwards(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL behind a firewall that passes only the configured ports."""
    clock = MockClock()
    cluster = make(clock=clock)
    with monkeypatch.context() as deaf:
        deaf.setattr(ShmListener, "receive", lambda _: None)
        transfer = cluster.transfer("r", tokens=27)
        transfer.open_senders()
        transfer.grant()
        transfer.final()
        sender, recorder = cluster.senders[0].end, cluster.senders[0].recorder
        wait_until(lambda: any(peer.in_flight for peer in list(sender._send._peers.values())), "a message is in flight")
        clock.advance(31.0)
        sender.apply(AbortOrder(AttemptKey("nobody", 1)))  # makes the thread look at the clock
        assert isinstance(recorder.wait(transfer.key, SourceReleased).error, PeerLost)
    cluster.transfer("r", attempt=2, tokens=27).run()
    assert "shm" not in moved(cluster.receivers[0])


@pytest.mark.parametrize("idle_s", [30.0, 10_000.0])
def test_transport_that_failed_is_tried_again_after_a_while(
    make: Any, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """Also when the fallback is used so often that its connection never becomes idle."""

    def cannot(*_: Any) -> Any:
        raise OSError("no memory left")

    clock = MockClock()
    cluster = make(clock=clock)
    cluster.senders[0].end._send.connections._idle_s = idle_s
    with monkeypatch.context() as broken:
        broken.setattr(ring, "create", cannot)
        cluster.transfer("first", tokens=27).run()
    clock.advance(FORGET_AFTER_S - 1)
    cluster.transfer("too soon", tokens=27).run()
    assert "shm" not in moved(cluster.receivers[0])
    clock.advance(2.0)
    cluster.transfer("later", tokens=27).run()
    assert moved(cluster.receivers[0])["shm"] > 0


def test_failures_are_bounded_and_the_oldest_is_forgotten() -> None:
    failures = TransportFailures()
    for i in range(2000):
        failures.record(f"a{i}", "shm", "broken", 0.0)
    assert not failures.of("a0", 0.0)
    assert failures.of("a1999", 0.0) == {"shm": "broken"}
    assert len(failures._reasons) == 1024


def test_sender_with_no_common_transport_fails_its_transfer(make: Any) -> None:
    cluster = make(layout(), layout())
    first = cluster.senders[0]
    lone = TransferEnd(
        first.storage,
        cluster.src_layout,
        0,
        first.recorder,
        [ShmConnector()],
        incarnation="src-1",
        wanted="zmq",
    )
    try:
        transfer = cluster.transfer()
        cluster.senders[0].end, kept = lone, cluster.senders[0].end
        transfer.open_senders()
        transfer.grant()
        error = cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error
        assert isinstance(error, HandshakeRefused)
        cluster.senders[0].end = kept
    finally:
        lone.close()


@pytest.mark.parametrize(
    ("wanted", "offered"), [("auto", ["zmq", "shm"]), ("zmq", ["zmq"]), ("shm", ["shm"]), ("collective", ["gloo"])]
)
def test_receiver_offers_what_its_configuration_allows(wanted: str, offered: list[str]) -> None:
    kv = layout()
    config = DecodeConfig(kv_transport=wanted)  # type: ignore[arg-type]
    storage = KVStorage(kv, kv.shard(0, 0), 4)
    receiver = factory.make_end(config, storage, kv, 0, Recorder(), incarnation="d", listen_port=0)
    try:
        assert [offer.transport for offer in parse_offers(receiver.address)] == offered
    finally:
        receiver.close()


def test_host_that_cannot_share_memory_offers_zmq_only_and_refuses_shm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (factory, same_host):
        monkeypatch.setattr(module, "host_id", lambda: None)
    kv = layout()
    storage = KVStorage(kv, kv.shard(0, 0), 4)
    receiver = factory.make_end(DecodeConfig(), storage, kv, 0, Recorder(), incarnation="d", listen_port=0)
    receiver.close()
    assert [offer.transport for offer in parse_offers(receiver.address)] == ["zmq"]
    with pytest.raises(ConfigError, match="Linux"):
        factory.make_end(DecodeConfig(kv_transport="shm"), storage, kv, 0, Recorder(), incarnation="d")


def test_gpu_offers_all_its_transports_and_a_cpu_refuses_cuda_ipc() -> None:
    kv = layout()
    on_gpu_storage, in_memory = KVStorage(kv, kv.shard(0, 0), 4, device="meta"), KVStorage(kv, kv.shard(0, 0), 4)
    assert factory._allowed("auto", on_gpu_storage, collectives=True) == ["zmq", "shm", "cuda_ipc", "nccl"]
    assert factory._allowed("collective", on_gpu_storage, collectives=True) == ["nccl"]
    assert factory._allowed("cuda_ipc", on_gpu_storage, collectives=True) == ["cuda_ipc"]
    with pytest.raises(ConfigError, match="CUDA device"):
        factory.make_end(DecodeConfig(kv_transport="cuda_ipc"), in_memory, kv, 0, Recorder(), incarnation="d")


def test_end_that_cannot_be_made_closes_its_transports() -> None:
    kv = layout()
    storage, recorder = KVStorage(kv, kv.shard(0, 0), 4), Recorder()
    listeners: list[Any] = [ZmqListener("127.0.0.1", 0), CollectiveListener("127.0.0.1", 0, backend="nccl")]
    with pytest.raises(ConfigError, match="CUDA"):
        TransferEnd(storage, kv, 0, recorder, [], listeners, incarnation="d")
    assert all(listener._router.socket.closed for listener in listeners)
    storage.host_bytes = None  # as on a GPU, but no device is given
    connector, listener = ZmqConnector(), ZmqListener("127.0.0.1", 0)
    with pytest.raises(AssertionError):
        TransferEnd(storage, kv, 0, recorder, [connector], [listener], incarnation="d")
    assert connector._context.closed
    assert listener._router.socket.closed
