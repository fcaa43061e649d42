"""What a leader says of a rank that ends while the node starts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

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


def test_a_rank_that_said_nothing_is_named(links: RankLinks) -> None:
    with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) ended with 1"):
        links.collect(RankReady, 10.0, "they load their shards")
