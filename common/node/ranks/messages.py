"""The messages between a node's leader and its other ranks, and their codec.

rank -> leader   RankHello, RankReady, RankStarted, RankBeat, RankExperts, RankFailed, RankLoadedAdapter, StepOutput,
                 TransferEvent
leader -> rank   RankSetup, RankStart, LeaderBeat, LoadAdapter, DropAdapter, StepInput, TransferOrder
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from common.base.errors import KvRelayError, TransferError
from common.control.codec import Codec
from common.control.messages import Role
from common.control.versions import PROTOCOL_VERSION, Versions
from common.engine.kv_transfer import ReceiveFailed, SourceReleased, TransferEvent, TransferOrder
from common.engine.step import StepInput, StepOutput
from common.model.mixture.report import ExpertReport

MAX_ORDER_BYTES = 512 * 2**20
"""Longest message from the leader to a rank; the socket itself refuses longer ones. For every sequence with penalties a
step holds up to eight bytes per token of the vocabulary: 300 MB for 256 sequences that have seen 150,000 tokens each."""
MAX_REPORT_BYTES = 64 * 2**20
"""Longest message from a rank to the leader. With 20 log-probabilities of each prompt token a step's row takes 300 bytes."""


@dataclass(frozen=True)
class RankHello:
    """A rank's process is up and receives orders at `address`."""

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
    """The rank's shard is loaded; `max_blocks` KV blocks would fit."""

    rank: int
    max_blocks: int
    peak_bytes: int
    """Peak memory of the process while loading."""


@dataclass(frozen=True)
class RankStart:
    """Order to open the transfer end of a role, in place of that of an earlier one; the first order also allocates KV memory."""

    role: Role
    num_blocks: int
    incarnation: str
    """The node's."""


@dataclass(frozen=True)
class RankStarted:
    """The rank is ready for steps. `data_address` is empty on ranks that only send."""

    rank: int
    data_address: str


@dataclass(frozen=True)
class RankBusy:
    """Seconds since a rank was ready for steps, and the part of them that it computed, without waits for other stages."""

    up_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True)
class RankBeat:
    """Heartbeat of a rank."""

    rank: int
    busy: RankBusy


@dataclass(frozen=True)
class RankExperts:
    """How the experts of a pipeline stage are loaded and placed, from its first rank."""

    rank: int
    report: ExpertReport


@dataclass(frozen=True)
class RankFailed:
    """A rank cannot go on; its process ends."""

    rank: int
    code: str
    message: str


@dataclass(frozen=True)
class LeaderBeat:
    """Heartbeat of the leader."""

    rank: int


@dataclass(frozen=True)
class LoadAdapter:
    """Load a LoRA adapter beside the steps, and answer with `RankLoadedAdapter`."""

    adapter_id: int
    """The id that `StepInput.adapters` uses; new at every load."""
    path: str
    digest: str
    """Digest of its weights when it was registered."""


@dataclass(frozen=True)
class DropAdapter:
    """Free a LoRA adapter after the steps that were sent before."""

    adapter_id: int


@dataclass(frozen=True)
class RankLoadedAdapter:
    """A rank's answer to `LoadAdapter`; `error` is empty if later steps can name the adapter."""

    rank: int
    adapter_id: int
    error: str


RankReport = (
    RankHello
    | RankReady
    | RankStarted
    | RankBeat
    | RankExperts
    | RankFailed
    | RankLoadedAdapter
    | StepOutput
    | TransferEvent
)
RankOrder = RankSetup | RankStart | LeaderBeat | LoadAdapter | DropAdapter | StepInput | TransferOrder

_pack = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]


class RankCodec(Codec):
    """The codec of these links. All ranks of a node run one version. An exception inside a transfer event becomes (code, message)."""

    def __init__(self) -> None:
        only = Versions(PROTOCOL_VERSION, PROTOCOL_VERSION)
        super().__init__(*get_args(RankReport), *get_args(RankOrder), spoken=only)

    def _pack(self, message: object, version: int) -> bytes:
        if isinstance(message, SourceReleased | ReceiveFailed):
            return _pack([version, type(message).__name__, message], default=_error_or_fields)
        return super()._pack(message, version)


def _error_or_fields(value: object) -> object:
    if not isinstance(value, Exception):
        return vars(value)
    return (value.code if isinstance(value, KvRelayError) else TransferError.code), str(value)
