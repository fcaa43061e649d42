"""What a node's leader and its other ranks say to each other, beside steps and transfer orders.

rank -> leader   RankHello, RankReady, RankStarted, RankBeat, RankFailed, StepOutput, reports of transfers
leader -> rank   RankSetup, RankStart, LeaderBeat, StepInput, orders to transfers
"""

from __future__ import annotations

from dataclasses import dataclass

from common.control.messages import Codec
from common.engine.step import StepInput, StepOutput

MAX_ORDER_BYTES = 512 * 2**20
"""A message of the leader to a rank above this is refused by the socket itself. A step carries, for every sequence with
penalties, up to eight bytes for each token of the vocabulary: 300 MB for 256 sequences that have seen 150,000 of them."""


@dataclass(frozen=True)
class RankHello:
    """A rank's process is up and takes orders at `address`."""

    rank: int
    address: str


@dataclass(frozen=True)
class RankSetup:
    """All ranks are up: connect to each other and load."""

    mesh_host: str
    mesh_port: int
    same_host: bool


@dataclass(frozen=True)
class RankReady:
    """The rank's shard is loaded; so many KV blocks would fit."""

    rank: int
    max_blocks: int
    peak_bytes: int
    """Memory of the process at its peak while loading."""


@dataclass(frozen=True)
class RankStart:
    """Lay out KV memory and open the transfer end. `incarnation` is the node's."""

    num_blocks: int
    incarnation: str


@dataclass(frozen=True)
class RankStarted:
    """The rank takes steps. `data_address` is empty on ranks that only send."""

    rank: int
    data_address: str


@dataclass(frozen=True)
class RankBusy:
    """Seconds since a rank began to take steps, and how many of them it computed; waits for other stages left out."""

    up_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True)
class RankBeat:
    """A rank lives."""

    rank: int
    busy: RankBusy


@dataclass(frozen=True)
class RankFailed:
    """A rank cannot go on; its process ends."""

    rank: int
    code: str
    message: str


@dataclass(frozen=True)
class LeaderBeat:
    """The leader lives."""

    rank: int


def rank_codec(*transfer_types: type) -> Codec:
    """The codec of these links; `transfer_types` come from the data plane, which this package does not know."""
    own = (RankHello, RankSetup, RankReady, RankStart, RankStarted, RankBeat, RankFailed, LeaderBeat)
    return Codec(*own, StepInput, StepOutput, *transfer_types)
