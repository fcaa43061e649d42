"""The contract between the engine and the KV relay: transfers, their events, and the two ends of a rank.

Each prefill rank owns one `KVSender`, each decode rank one `KVReceiver`. Both run their I/O on a thread of
their own and report through a callback called on that thread; every method returns at once.

Memory safety, both ends alike: from `open` until the `...Released` event the engine must not reuse the blocks
of a transfer. After that event the transport never touches them again, whatever still arrives.
Exactly one `...Released` follows each `open`, also after `abort`, failure and `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.control.messages import AttemptKey, Grant, PeerRef
from common.kv.layout import KVLayout


@dataclass(frozen=True)
class Traffic:
    """What one attempt moved between one rank of this node and one of the other node."""

    rank: int
    peer_rank: int
    transport: str
    why: str
    """Empty at the receiving end: the sender chooses."""
    size_bytes: int


@dataclass(frozen=True)
class OutgoingTransfer:
    """One attempt's KV as the sending rank holds it. `src_blocks[i]` is the sequence's i-th block."""

    key: AttemptKey
    src_incarnation: str
    src_blocks: list[int]
    block_hashes: list[bytes]
    num_tokens: int
    timeout_s: float
    """Given up after so long without progress: a batch handed to the wire or acknowledged, or more blocks final. The
    clock starts at the grant; until then the owner's own deadline rules."""
    final_blocks: int = 0
    """Leading blocks that are final in every layer from the start: those of the prefix cache."""


@dataclass(frozen=True)
class IncomingTransfer:
    """One attempt's KV as the receiving rank expects it: blocks [held_blocks, len(dst_blocks)) will come."""

    key: AttemptKey
    src: PeerRef
    src_layout: KVLayout
    dst_blocks: list[int]
    block_hashes: list[bytes]
    held_blocks: int
    timeout_s: float
    """Given up after so long without progress: a slice placed. The clock starts at `open`."""


# Events of a sender. Each names its attempt.


@dataclass(frozen=True)
class SourceReleased:
    """Nothing reads the source blocks any more. `error` is None if the other end has acknowledged every slice."""

    key: AttemptKey
    bytes_sent: int
    error: Exception | None = None
    traffic: tuple[Traffic, ...] = ()
    """The same bytes, by pair of ranks and transport."""


# Events of a receiver.


@dataclass(frozen=True)
class Received:
    """All slices are in place and verified."""

    key: AttemptKey
    bytes_received: int
    traffic: tuple[Traffic, ...] = ()
    """The same bytes, by pair of ranks and transport."""


@dataclass(frozen=True)
class ReceiveFailed:
    """The transfer cannot complete: no progress, corrupt slice. The caller must `abort` it."""

    key: AttemptKey
    error: Exception


@dataclass(frozen=True)
class DestinationReleased:
    """Nothing writes the destination blocks any more. Follows `Received`, or answers `abort`."""

    key: AttemptKey


SenderEvent = SourceReleased
ReceiverEvent = Received | ReceiveFailed | DestinationReleased
OnSenderEvent = Callable[[SenderEvent], None]
OnReceiverEvent = Callable[[ReceiverEvent], None]


class KVSender(Protocol):
    """The sending end of one prefill rank."""

    def open(self, transfer: OutgoingTransfer) -> None:
        """Announce a transfer. Nothing is sent before `grant`.

        Raises: TransferError if this key is open already or this end is closed.
        """
        ...

    def grant(self, grant: Grant) -> None:
        """The destination is ready; blocks from `grant.held_blocks` on may go out as they become final.

        Ignored for unknown or aborted transfers.
        """
        ...

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """Layer `layer` (of this rank) holds final KV in blocks [0, num_blocks). Called by the engine's
        thread between two layers: must take microseconds. Calls for one layer never go backwards."""
        ...

    def abort(self, key: AttemptKey) -> None:
        """Stop; `SourceReleased` follows. Ignored for unknown transfers."""
        ...

    def disconnect(self, incarnation: str) -> None:
        """That incarnation of a node could not be reached: end the connections to it, and the transfers over them.
        The next grant makes new ones, which need not wait until TCP tries the old ones again."""
        ...

    def close(self) -> None:
        """Stop the thread, close all sockets, release all transfers."""
        ...


class KVReceiver(Protocol):
    """The receiving end of one decode rank."""

    @property
    def address(self) -> str:
        """Where senders reach this rank, as `kvtransfer.transports.choose` reads it; goes into `PeerRef.data_addresses`."""
        ...

    def open(self, transfer: IncomingTransfer) -> None:
        """Accept slices of this attempt from this source incarnation. Must precede the `Grant`.

        Raises: TransferError if this key is open already or this end is closed.
        """
        ...

    def abort(self, key: AttemptKey) -> None:
        """Stop writing; `DestinationReleased` follows. Late slices are discarded. Ignored for unknown transfers."""
        ...

    def close(self) -> None:
        """Stop the thread, close the socket, release all transfers."""
        ...
