"""What a leader says of a rank that ends."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import zmq
from support.certificates import made
from support.zmtp import connected, frame

from common.base import bounded_messages
from common.base.errors import ConfigError, RankLost
from common.cluster.address import HostAddresses
from common.config.service_configs import DecodeConfig
from common.node.ranks.links import RankLinks
from common.node.ranks.messages import LeaderBeat, RankCodec, RankFailed, RankHello, RankReady, RankSetup
from common.node.ranks.process import RankProcess
from common.node.ranks.sockets import node_secret

CODEC = RankCodec()


def on_one_host(config: DecodeConfig) -> SimpleNamespace:
    """What a rank's process reads of its plan before it joins the others."""
    return SimpleNamespace(config=config, addresses=HostAddresses.of(config), is_on_one_host=True)


def ended_by(argv: list[str]) -> subprocess.Popen[bytes]:
    """A process that has ended."""
    child = subprocess.Popen(argv)
    child.wait(30)
    return child


@contextlib.contextmanager
def said(links: RankLinks, report: object) -> Iterator[None]:
    """A rank has sent this, and its socket is open."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(links.address)
        socket.send(CODEC.encode(report))
        yield


NO_MEMORY = RankFailed(1, ConfigError.code, "no memory for 7 KV blocks")


class SaidJustNow(RankLinks):
    """A rank says why it ends, and ends, just after the leader has looked for reports."""

    def check_children(self) -> None:
        with said(self, NO_MEMORY):
            pass
        super().check_children()


def leader(kind: type[RankLinks]) -> Iterator[RankLinks]:
    """One whose rank 1 has ended, while it was busy itself."""
    links = kind(2, "127.0.0.1", 0)
    links._children[1] = ended_by(["false"])
    yield links
    links.close()


@pytest.fixture
def links() -> Iterator[RankLinks]:
    yield from leader(RankLinks)


@pytest.fixture
def said_just_now() -> Iterator[RankLinks]:
    yield from leader(SaidJustNow)


def test_a_rank_that_said_why_it_ends_is_quoted(links: RankLinks) -> None:
    with said(links, NO_MEMORY):
        assert links._reports._socket.poll(10_000)
        with pytest.raises(ConfigError, match="rank 1: no memory for 7 KV blocks"):
            links.collect(RankReady, 10.0, "they load their shards")


def test_a_reason_still_on_its_way_wins_over_the_end_itself(said_just_now: RankLinks) -> None:
    with pytest.raises(ConfigError, match="rank 1: no memory for 7 KV blocks"):
        said_just_now.collect(RankReady, 10.0, "they load their shards")


@pytest.mark.parametrize(
    ("crashed", "told"), [(2, r"rank 2 \(pid \d+\) ended with -11"), (1, "rank 1: no memory for 7")]
)
def test_but_not_over_another_ranks_crash(said_just_now: RankLinks, crashed: int, told: str) -> None:
    """Those that live tell what followed. What it said itself counts, though it crashed as it ended."""
    said_just_now._children[crashed] = ended_by([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    with pytest.raises((RankLost, ConfigError), match=told), said_just_now.prefer_rank_error():
        said_just_now.check_children()


def test_it_does_while_the_node_serves_too(said_just_now: RankLinks) -> None:
    dead: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    said_just_now.run(lambda _: None, dead.put, lease_s=0.6)
    error = dead.get(timeout=30)
    assert isinstance(error, ConfigError)
    assert "no memory for 7 KV blocks" in str(error)


def test_a_leader_that_waits_in_vain_for_a_rank_says_what_that_rank_said(links: RankLinks) -> None:
    report = RankFailed(1, ConfigError.code, "there is no interface eth7")
    with (
        said(links, report),
        pytest.raises(ConfigError, match="rank 1: there is no interface eth7"),
        links.prefer_rank_error(),
    ):
        raise RankLost("rank 1 did not come to 127.0.0.1:7 within 60 s")


def test_of_ranks_that_ended_the_one_that_was_killed_is_named(links: RankLinks) -> None:
    links._children[2] = ended_by([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(RankLost, match=r"rank 2 \(pid \d+\) ended with -9"), links.prefer_rank_error():
        links.check_children()


def test_ranks_have_what_is_left_of_the_start_and_what_they_said_counts_after_it() -> None:
    links = RankLinks(2, "127.0.0.1", 0)
    with said(links, RankReady(1, 7, 0)):
        assert links._reports._socket.poll(10_000)
        long_ago_s = time.monotonic() - 700.0
        assert links.collect(RankReady, 600.0, "they load their shards", since_s=long_ago_s)[1].max_blocks == 7
        with pytest.raises(ConfigError, match=r"no report from ranks \[1\] within 600 s: they load their shards"):
            links.collect(RankReady, 600.0, "they load their shards", since_s=long_ago_s)
    links.close()


def test_a_rank_that_said_nothing_is_named(links: RankLinks) -> None:
    with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) ended with 1"):
        links.collect(RankReady, 10.0, "they load their shards")


def test_a_start_that_is_stopped_closes_no_socket_under_the_thread_that_reads_it() -> None:
    links = RankLinks(2, "127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(links.collect, RankReady, 600.0, "they load their shards")
        while links._reading.acquire(blocking=False):  # until the other thread has it
            links._reading.release()
            time.sleep(0.001)
        links.close()
        with pytest.raises(RankLost, match="the node ends"):
            waits.result(10)


def test_with_a_rank_goes_the_compiler_that_it_waits_for() -> None:
    links = RankLinks(2, "127.0.0.1", 0)
    rank = subprocess.Popen(["sh", "-c", "sleep 60 & echo compiles; wait"], stdout=subprocess.PIPE)
    links._children[1] = rank
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"compiles\n"
    links.close()
    rank.communicate(timeout=30)  # to the end of the output that the compiler shares


# ---------------------------------------------------------------- with certificates


def test_rank_with_certificates_reports_to_its_leader_and_takes_its_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecodeConfig(model="m", tls_dir=str(made() / "node"))

    def no_mesh(*_: object) -> None:
        raise ConfigError("there is no interface eth7")

    monkeypatch.setattr("common.node.ranks.process.join_mesh", no_mesh)
    monkeypatch.setattr("common.node.ranks.process.configure_torch", lambda _: None)
    links = RankLinks(2, "127.0.0.1", 0, node_secret(config.tls_dir))
    plan = on_one_host(config)
    rank = RankProcess(SimpleNamespace(), plan, 1, links.address)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(rank.run)
        hello = links.collect(RankHello, 30.0, "their processes are starting")[1]
        assert "?key=" in hello.address
        links.broadcast(RankSetup("127.0.0.1", 7, same_host=True))
        with pytest.raises(ConfigError, match="rank 1: there is no interface eth7"):
            links.collect(RankReady, 30.0, "they load their shards")
        with pytest.raises(ConfigError):
            runs.result(30)
    links.close()


# ---------------------------------------------------------------- messages that never end


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_messages, "MAX_BYTES", 2**20)
    monkeypatch.setattr(bounded_messages, "_CHECK_S", 0.0)
    monkeypatch.setattr("common.node.ranks.process.MAX_ORDER_BYTES", 2**16)


def until_closed(endpoint: str, receive: Callable[[], object]) -> None:
    """Somebody sends a message in parts without end; `receive` gets nothing of it, and closes the connection."""
    part = frame(bytes(2**16), more=True)
    with connected(endpoint, b"PUSH") as hostile:
        hostile.settimeout(0.01)
        end_s = time.monotonic() + 20
        while True:
            try:
                hostile.sendall(part)
            except TimeoutError:
                pass
            except OSError:
                return
            assert not receive()
            assert time.monotonic() < end_s, "the connection stays open"


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes as only Linux does")
def test_a_report_that_never_ends_costs_its_connection_and_the_next_one_is_read() -> None:
    links = RankLinks(2, "127.0.0.1", 0)
    until_closed(links.address, lambda: list(links._receive(timeout_ms=1)))
    with said(links, RankReady(1, 7, 0)):
        assert links.collect(RankReady, 10.0, "they load their shards")[1].max_blocks == 7
    links.close()


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes as only Linux does")
def test_an_order_that_never_ends_costs_its_connection_and_the_next_one_is_read(links: RankLinks) -> None:
    plan = on_one_host(DecodeConfig(model="m"))
    rank = RankProcess(SimpleNamespace(), plan, 1, links.address)  # type: ignore[arg-type]
    address = rank._orders.address
    until_closed(address, lambda: rank._next_order(0.001))
    with zmq.Context() as context, context.socket(zmq.PUSH) as leader:
        leader.connect(address)
        leader.send(CODEC.encode(LeaderBeat(1)))
        assert rank._next_order(10.0) == LeaderBeat(1)
    rank._orders.close()
    rank._context.destroy(linger=0)
