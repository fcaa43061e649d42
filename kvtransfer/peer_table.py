"""The connections over which one rank sends: the transport to each receiving rank, and when a connection is given up.

Used by the I/O thread of its transfer end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.base.clock import Clock
from common.base.errors import PeerLost
from common.control.messages import Grant
from common.control.versions import PROTOCOL_VERSION
from common.security.sealed_endpoints import without_keys
from kvtransfer.tables import SendTable
from kvtransfer.transports.base import Connector, Peer
from kvtransfer.transports.choose import ChosenTransport, TransportFailures, choose, parse_offers

log = logging.getLogger(__name__)

_MAX_LOGGED = 1024


class PeerTable:
    """One `Peer` for each data address in use. When a peer is lost, its transfers fail."""

    def __init__(
        self,
        rank: int,
        connectors: Sequence[Connector],
        transfers: SendTable,
        *,
        wanted: str,
        idle_s: float,
        clock: Clock,
    ) -> None:
        self._rank = rank
        self._connectors = {connector.offer.transport: connector for connector in connectors}
        self._transfers = transfers
        self._wanted = wanted
        self._idle_s = idle_s
        self._clock = clock
        self.peers: dict[str, Peer] = {}
        """By data address."""
        self._failures = TransportFailures()
        self._logged: dict[tuple[int, str], None] = {}
        """Ranks and incarnations whose transport was logged."""

    def get_or_connect(self, grant: Grant, dst_rank: int) -> Peer:
        """The connection to that rank of the grant's incarnation, made if there is none.

        Raises: HandshakeRefused if no transport serves both ranks, PeerLost if the rank cannot be reached.
        """
        address, incarnation = grant.dst.data_addresses[dst_rank], grant.dst.incarnation
        peer = self.peers.get(address)
        if peer is not None and peer.incarnation != incarnation:
            self.lose(address, f"incarnation {incarnation} has taken over its address")
            peer = None
        elif peer is not None and peer.is_fallback and peer.unused and not self._failures.of(address, self._clock()):
            self.lose(address, "a preferred transport can be tried again")
            peer = None
        if peer is None:
            peer = self.peers[address] = self._connect(grant, dst_rank)
        return peer

    def fail(self, address: str, peer: Peer, reason: str) -> None:
        """A connection broke. A transport that has never worked is avoided for a while."""
        if not peer.proven:
            self._record_failure(address, peer.transport, reason)
        self.lose(address, reason)

    def lose(self, address: str, reason: str) -> None:
        """Close a connection; its transfers fail."""
        peer = self.peers.pop(address)
        lent = [peer.revoke(sequence) for sequence in list(peer.lent)]
        peer.close()
        for key in peer.transfers:
            self._transfers.fail(key, PeerLost(f"{key}: lost {without_keys(address)} ({peer.incarnation}): {reason}"))
        for batch in lent:
            self._transfers.dropped(batch)

    def lose_all(self, reason: str, incarnation: str | None = None) -> None:
        """Close all connections, or those to one incarnation of a node; their transfers fail."""
        for address, peer in list(self.peers.items()):
            if incarnation in (None, peer.incarnation):
                self.lose(address, reason)

    def drop_idle(self, now: float) -> None:
        """Close connections that have been unused, or have waited for an ack, for too long."""
        for address, peer in list(self.peers.items()):
            if now - peer.last_progress < self._idle_s:
                continue
            if peer.in_flight:
                self.fail(address, peer, f"no ack for {self._idle_s} s")
            elif peer.unused:
                self.lose(address, "idle")

    def _connect(self, grant: Grant, dst_rank: int) -> Peer:
        """A connection over the best transport that works, which is not always the best one that both ranks offer.

        Raises: see `get_or_connect`.
        """
        address, incarnation = grant.dst.data_addresses[dst_rank], grant.dst.incarnation
        ours, theirs = [c.offer for c in self._connectors.values()], parse_offers(address)
        while True:
            failed = self._failures.of(address, self._clock())
            chosen = choose(ours, theirs, self._wanted, failed)
            transport = chosen.offer.transport
            try:
                peer = self._connectors[transport].connect(chosen.offer, incarnation, self._clock())
            except PeerLost as error:
                if transport in failed:  # all others have failed, too
                    raise
                self._record_failure(address, transport, error.message)
                continue
            peer.why = chosen.why
            peer.is_fallback = bool(failed)
            peer.protocol = min(PROTOCOL_VERSION, grant.protocol)
            self._log_transport(grant, dst_rank, chosen)
            return peer

    def _record_failure(self, address: str, transport: str, reason: str) -> None:
        """For a while, connections to `address` use another transport, if there is one."""
        log.warning("%s to %s failed: %s", transport, without_keys(address), reason)
        self._failures.record(address, transport, reason, self._clock())

    def _log_transport(self, grant: Grant, dst_rank: int, chosen: ChosenTransport) -> None:
        """Log the transport to a rank of an incarnation once."""
        key = dst_rank, grant.dst.incarnation
        if key in self._logged:
            return
        log.info(
            "rank %d sends to rank %d of %s (%s) over %s: %s",
            self._rank,
            dst_rank,
            grant.dst.node_id,
            grant.dst.incarnation,
            chosen.offer.transport,
            chosen.why,
        )
        if len(self._logged) >= _MAX_LOGGED:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = None
