"""What a leader says of a rank that ends while the node starts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from common.errors import ConfigError, RankLost
from common.node.rank_messages import RankFailed, RankReady, rank_codec
from common.node.ranks import RankLinks

CODEC = rank_codec()


@pytest.fixture
def links() -> Iterator[RankLinks]:
    """Of a leader whose rank 1 has ended, while it was busy itself."""
    made = RankLinks(CODEC, 2, "127.0.0.1", 0)
    child = subprocess.Popen(["false"])
    child.wait(30)
    made._children[1] = child
    yield made
    made.close()


def test_a_rank_that_said_why_it_ends_is_quoted(links: RankLinks) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(links.address)
        socket.send(CODEC.encode(RankFailed(1, ConfigError.code, "no memory for 7 KV blocks")))
        assert links._reports.poll(10_000)
        with pytest.raises(ConfigError, match="rank 1: no memory for 7 KV blocks"):
            links.collect(RankReady, 10.0, "they load their shards")


def test_ranks_have_what_is_left_of_the_start_and_what_they_said_counts_after_it() -> None:
    links = RankLinks(CODEC, 2, "127.0.0.1", 0)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(links.address)
        socket.send(CODEC.encode(RankReady(1, 7, 0)))
        assert links._reports.poll(10_000)
        long_ago_s = time.monotonic() - 700.0
        assert links.collect(RankReady, 600.0, "they load their shards", since_s=long_ago_s)[1].max_blocks == 7
        with pytest.raises(ConfigError, match=r"ranks \[1\] did not come within 600 s: they load their shards"):
            links.collect(RankReady, 600.0, "they load their shards", since_s=long_ago_s)
    links.close()


def test_a_rank_that_said_nothing_is_named(links: RankLinks) -> None:
    with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) ended with 1"):
        links.collect(RankReady, 10.0, "they load their shards")


def test_a_start_that_is_stopped_closes_no_socket_under_the_thread_that_reads_it() -> None:
    links = RankLinks(CODEC, 2, "127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(links.collect, RankReady, 600.0, "they load their shards")
        while not links._collecting.locked():
            time.sleep(0.001)
        links.close()
        with pytest.raises(RankLost, match="the node ends"):
            waits.result(10)
