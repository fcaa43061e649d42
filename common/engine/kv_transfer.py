"""The interface between the engine and the KV relay: transfers, their events, and the ends of a rank and a node.

Each prefill rank owns one `KVSender`, each decode rank one `KVReceiver`. Both run their I/O on a thread of
their own and report through a callback called on that thread; every method returns at once.

The leader of a node with several ranks sends transfer orders to the `RankTransferEnd` of every other rank, and gets that
end's events back.

Memory safety, both ends alike: from `open` until the `...Released` event the engine must not reuse the blocks
of a transfer from `first_blocks` on. After that event the transport never touches them again, whatever still arrives.
Exactly one `...Released` follows each `open`, also after `abort`, failure and `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import PlainValidator

from common.base.errors import KvRelayError, from_code
from common.cluster.address import HostAddresses
from common.config.service_configs import NodeConfig
from common.control.messages import AttemptKey, Grant, PeerRef
from common.kv.rank_layout import KVLayout

STAGING_BYTES = 256 * 2**20
"""Limit of NCCL staging buffers, on top of the KV cache. It does not include what NCCL itself allocates for each pair
of connected ranks, which is not known beforehand."""


@dataclass(frozen=True)
class RelaySettings:
    """How a node's KV moves to and from other nodes."""

    transport: str
    """`--kv-transport`."""
    may_use_collectives: bool
    """NCCL and gloo may connect hosts although they cannot encrypt."""
    sealed: bool
    """KV over ZMQ is encrypted."""
    addresses: HostAddresses
    port: int
    """Of the leader's data socket; 0 picks a free one."""
    timeout_s: float
    """Idle timeout of a transfer."""

    @classmethod
    def of(cls, config: NodeConfig) -> RelaySettings:
        return cls(
            transport=config.kv_transport,
            may_use_collectives=config.may_use_collectives,
            sealed=config.tls_dir is not None,
            addresses=HostAddresses.of(config),
            port=config.data_port,
            timeout_s=config.transfer_timeout_s,
        )


def _error_from_wire(value: Any) -> KvRelayError | None:
    return None if value is None else from_code(*value)


WireError = Annotated[Exception, PlainValidator(_error_from_wire)]
"""An exception that travels between processes as (code, message), see `common.node.ranks.messages.RankCodec`."""


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
class OutgoingTransfer:
    """One attempt's KV as the sending rank holds it. `src_blocks[t][i]` is the sequence's i-th block in block table t."""

    key: AttemptKey
    src_incarnation: str
    src_blocks: list[list[int]]
    first_blocks: list[int]
    """For each block table, the first block that the sender holds until it has sent it; earlier ones are behind the
    sliding window."""
    block_hashes: list[bytes]
    num_tokens: int
    timeout_s: float
    """Idle timeout. Progress is: a batch sent or acknowledged, more blocks final, or an acknowledgement of
    another transfer behind which this one waits. The clock starts at the grant; until then the owner's own deadline
    applies."""
    final_blocks: int = 0
    """Leading blocks that are final in every layer from the start: those of the prefix cache."""


@dataclass(frozen=True)
class IncomingTransfer:
    """One attempt's KV as the receiving rank expects it: of block table t, blocks from `first_blocks[t]` on will come."""

    key: AttemptKey
    src: PeerRef
    src_layout: KVLayout
    dst_blocks: list[list[int]]
    block_hashes: list[bytes]
    first_blocks: list[int]
    timeout_s: float
    """Idle timeout. Progress is: a slice placed, of this transfer or of another one from the same node, behind which it may
    wait. The clock starts at the first one of its own: the sender may have to compute a long prefix before it that is not
    wanted here. Until then the sender's timeout and the owner's own deadline apply, and on a stage of a pipeline always:
    the sender computes the other stages' layers before each further slice."""
    timeline: bool = False
    """Report when each layer had arrived."""


# Events of a sender. Each names its attempt.


@dataclass(frozen=True)
class SourceReleased:
    """Nothing reads the source blocks any more. `error` is None if the other end has acknowledged every slice."""

    key: AttemptKey
    bytes_sent: int
    error: WireError | None = None
    traffic: tuple[Traffic, ...] = ()
    """The same bytes, by pair of ranks and transport."""


# Events of a receiver.


@dataclass(frozen=True)
class Opened:
    """The rank accepts slices of this attempt. Reported by ranks other than the leader's; once all have, the leader
    reports it for the node: the grant may go out."""

    key: AttemptKey


@dataclass(frozen=True)
class Received:
    """All slices are in place and verified."""

    key: AttemptKey
    bytes_received: int
    traffic: tuple[Traffic, ...] = ()
    """The same bytes, by pair of ranks and transport."""
    layers: tuple[tuple[int, float], ...] = ()
    """(layer, seconds from `open` until all of it had arrived), if the transfer has a timeline."""


@dataclass(frozen=True)
class ReceiveFailed:
    """The transfer cannot complete: no progress, corrupt slice. The caller must `abort` it."""

    key: AttemptKey
    error: WireError


@dataclass(frozen=True)
class DestinationReleased:
    """Nothing writes the destination blocks any more. Follows `Received`, or answers `abort`."""

    key: AttemptKey


SenderEvent = SourceReleased
ReceiverEvent = Opened | Received | ReceiveFailed | DestinationReleased
TransferEvent = SenderEvent | ReceiverEvent
OnSenderEvent = Callable[[SenderEvent], None]
OnReceiverEvent = Callable[[ReceiverEvent], None]
OnTransferEvent = Callable[[TransferEvent], None]
OnBlocksFinal = Callable[[AttemptKey, int, int], None]
"""(attempt, layer of this rank, number of leading blocks whose KV in that layer is final)"""


# Orders of the leader to the transfer end of another rank. Each is a call of the method named in its docstring.


@dataclass(frozen=True)
class OpenSourceOrder:
    """`KVSender.open`."""

    transfer: OutgoingTransfer


@dataclass(frozen=True)
class GrantOrder:
    """`KVSender.grant`."""

    grant: Grant


@dataclass(frozen=True)
class DisconnectOrder:
    """`KVSender.disconnect`."""

    incarnation: str


@dataclass(frozen=True)
class OpenDestinationOrder:
    """`KVReceiver.open`; `Opened` follows."""

    transfer: IncomingTransfer


@dataclass(frozen=True)
class AbortOrder:
    """`KVSender.abort` or `KVReceiver.abort`."""

    key: AttemptKey


TransferOrder = OpenSourceOrder | GrantOrder | DisconnectOrder | OpenDestinationOrder | AbortOrder


class KVSender(Protocol):
    """The sending end of one prefill rank."""

    def open(self, transfer: OutgoingTransfer) -> None:
        """Announce a transfer. Nothing is sent before `grant`.

        Raises: TransferError if this key is open already or this end is closed.
        """
        ...

    def grant(self, grant: Grant) -> None:
        """The destination is ready; blocks from `grant.first_blocks` on may go out as they become final.

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
        """End the connections to this incarnation, which could not be reached, and the transfers over them.
        The next grant makes new ones, so it need not wait for TCP retransmission."""
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


class RankTransferEnd(Protocol):
    """The transfer end of a rank other than the leader's: takes the leader's orders, reports events through a callback."""

    @property
    def data_address(self) -> str:
        """As `KVReceiver.address`; empty on a rank that only sends."""
        ...

    @property
    def on_blocks_final(self) -> OnBlocksFinal | None:
        """`KVSender.blocks_final`; None on a rank that only receives."""
        ...

    def apply(self, order: TransferOrder) -> None:
        """Carry out one order."""
        ...

    def close(self) -> None:
        """Stop the thread, close all sockets, release all transfers."""
        ...


class NodeTransfers(Protocol):
    """The transfer ends of all ranks of a node, as its leader uses them."""

    @property
    def address(self) -> str:
        """Data address of the leader's own rank; empty on a node that only sends."""
        ...

    @property
    def on_blocks_final(self) -> OnBlocksFinal | None:
        """`KVSender.blocks_final` of the leader's own rank; None on a node that only receives."""
        ...

    def on_event(self, event: TransferEvent) -> None:
        """Take an event of any rank's end. Any thread."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """The traffic of each pair of ranks, as plain data for the admin port."""
        ...

    def close(self) -> None:
        """Close the leader's own end."""
        ...
