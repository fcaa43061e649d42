"""The interface between the engine and the KV relay: what moves, the orders to a rank's transfer end, and its events.

Each rank owns one `TransferEnd`, which sends and receives KV. Its I/O runs on a thread of its own, which also reports events
through a callback; every method returns at once. The leader of a node gives each order to the ends of all ranks
(`common.node.transfers`).

Memory safety, in both directions: from the order that opens a transfer until its `...Released` event the engine must not
reuse the transfer's blocks from `first_blocks` on. After that event the end never touches them again, whatever still
arrives. Exactly one `...Released` follows each opening, also after an abort, a failure or `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import PlainValidator

from common.base.errors import KvRelayError, from_code
from common.control.messages import AttemptKey, Grant, PeerRef
from common.kv.rank_layout import KVLayout

STAGING_BYTES = 256 * 2**20
"""Limit of NCCL staging buffers in each direction, on top of the KV cache. It does not include what NCCL itself allocates
for each pair of connected ranks, which is not known beforehand."""


def _error_from_wire(value: Any) -> KvRelayError | None:
    return None if value is None else from_code(*value)


WireError = Annotated[Exception, PlainValidator(_error_from_wire)]
"""An exception that travels between processes as (code, message), see `common.node.ranks.messages.RankCodec`."""


@dataclass(frozen=True)
class TransferPlan:
    """The KV of one attempt that moves, and where this node has it or wants it."""

    key: AttemptKey
    blocks: list[list[int]]
    """`blocks[t][i]` is the sequence's i-th block in block table t."""
    first_blocks: list[int]
    """For each block table, the first block that may move. The source node keeps none before it (they are behind the sliding
    window); the destination node needs none."""
    block_hashes: list[bytes]
    timeout_s: float
    """Idle timeout. `OpenSourceOrder` and `OpenDestinationOrder` say what counts as progress."""


# Orders to a transfer end. The leader sends them to the ends of other ranks over their links.


@dataclass(frozen=True)
class OpenSourceOrder:
    """Prepare to send. Nothing is sent before the grant, when the timeout starts; until then the owner's own deadline
    applies.

    Progress is: a batch sent or acknowledged, more blocks final, or an acknowledgement of another transfer behind which
    this one waits.
    """

    plan: TransferPlan
    final_blocks: int = 0
    """Leading blocks that are final in every layer from the start: those of the prefix cache."""


@dataclass(frozen=True)
class GrantOrder:
    """The destination is ready: send blocks from `grant.first_blocks` on as they become final.

    Ignored for unknown or aborted transfers.
    """

    grant: Grant


@dataclass(frozen=True)
class OpenDestinationOrder:
    """Accept slices of this attempt from the incarnation of `src`; `Opened` follows. Must precede the `Grant`.

    Any slice from the same node restarts the timeout, because this transfer may be queued behind it. The timeout starts at
    the first slice of its own: the sender may have to compute a long prefix before it that is not wanted here.
    Until then the sender's timeout and the owner's own deadline apply, and on a stage of a pipeline always: the sender
    computes the other stages' layers before each further slice.
    """

    plan: TransferPlan
    src: PeerRef
    src_layout: KVLayout
    timeline: bool = False
    """Report when each layer had arrived."""


@dataclass(frozen=True)
class AbortOrder:
    """Stop a transfer of either direction; its `...Released` event follows. Late slices are discarded. Ignored for
    unknown transfers."""

    key: AttemptKey


@dataclass(frozen=True)
class DisconnectOrder:
    """End the connections to this incarnation, which could not be reached, and the transfers that send over them.

    The next grant makes new ones, so it need not wait for TCP retransmission.
    """

    incarnation: str


TransferOrder = OpenSourceOrder | GrantOrder | OpenDestinationOrder | AbortOrder | DisconnectOrder


# Events of a transfer end. Each names its attempt.


@dataclass(frozen=True)
class Traffic:
    """Bytes that one attempt moved between one rank of this node and one of the other node."""

    rank: int
    peer_rank: int
    transport: str
    why: str
    """Empty at the receiving end: the sender chooses."""
    size_bytes: int


@dataclass(frozen=True)
class SourceReleased:
    """Nothing reads the source blocks any more. `error` is None if the other end has acknowledged every slice."""

    key: AttemptKey
    bytes_sent: int
    error: WireError | None = None
    traffic: tuple[Traffic, ...] = ()
    """The same bytes, by pair of ranks and transport."""


@dataclass(frozen=True)
class Opened:
    """The rank accepts slices of this attempt. Once all ranks do, the grant may go out."""

    key: AttemptKey


@dataclass(frozen=True)
class Received:
    """All slices are in place and verified."""

    key: AttemptKey
    bytes_received: int
    traffic: tuple[Traffic, ...] = ()
    """The same bytes, by pair of ranks and transport."""
    layers: tuple[tuple[int, float], ...] = ()
    """(layer, seconds from the opening until all of it had arrived), if the transfer has a timeline."""


@dataclass(frozen=True)
class ReceiveFailed:
    """The transfer cannot complete: no progress, corrupt slice. The caller must abort it."""

    key: AttemptKey
    error: WireError


@dataclass(frozen=True)
class DestinationReleased:
    """The destination blocks are no longer written. This event follows `Received` or an abort."""

    key: AttemptKey


TransferEvent = SourceReleased | Opened | Received | ReceiveFailed | DestinationReleased
OnTransferEvent = Callable[[TransferEvent], None]
OnBlocksFinal = Callable[[AttemptKey, int, int], None]
"""(attempt, layer of this rank, number of leading blocks whose KV in that layer is final)"""


class TransferEnd(Protocol):
    """The end of all transfers of one rank, in both directions. A node sends an attempt's KV or receives it, never both."""

    @property
    def address(self) -> str:
        """Where other ranks send KV to this one, for `PeerRef.data_addresses`. Empty if this end only sends."""
        ...

    def apply(self, order: TransferOrder) -> None:
        """Carry out one order. The key of a transfer that it opens must not be open.

        Raises: TransferError if it opens a transfer and this end is closed.
        """
        ...

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """Layer `layer` (of this rank) holds final KV in blocks [0, num_blocks). Called by the engine's
        thread between two layers: must take microseconds. Calls for one layer never go backwards."""
        ...

    def close(self) -> None:
        """Stop the thread, close all sockets, release all transfers."""
        ...
