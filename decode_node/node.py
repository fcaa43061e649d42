"""The core of a decode node: what it does on every event. Runs on the engine's thread, does no I/O itself.

One attempt here, by `Phase`: a relayed one waits for the prefill node's offer, gets blocks (the grant),
receives KV, and joins the running batch when every slice and the first token are in; a local one goes to the
scheduler at once, its prompt computed in chunks between the others' decode rows.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.base.errors import CorruptSlice, HandshakeRefused, KvRelayError, PeerLost, ProtocolError, TransferAborted
from common.base.hashing import BlockHash, hash_blocks
from common.control.identities import pack_ids
from common.control.links import Identity
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    AttemptStats,
    DecodeRequest,
    Grant,
    NodeLoad,
    Offer,
    PrefillDone,
    TransferAbort,
    TransferReceived,
)
from common.control.versions import PROTOCOL_VERSION
from common.engine.kv_transfer import DestinationReleased, Opened, Received, ReceiveFailed, TransferPlan
from common.engine.scheduled_step import SequenceOutput
from common.engine.sequence_state import SequenceState
from common.engine.waiting_queue import insert_by_priority
from common.kv.rank_layout import check_compatible
from common.node.attempt import Attempt, token_chunk
from common.node.core import CoreParts, NodeCore
from common.node.events import ClientLost, FromClient
from common.node.transfers import NodeTransfers
from decode_node.early import EarlyMessages, Messages
from decode_node.hand_on_queue import MOST_BLOCKS, HandOnQueue, received_once
from decode_node.pacing import rest_s

log = logging.getLogger(__name__)


class Phase(Enum):
    """Where an attempt stands on this node."""

    NO_OFFER = "no offer yet"
    DEFERRED = "offered, no room yet"
    RECEIVING = "granted, slices arrive"
    ARRIVED = "KV complete, first token not yet in"
    ACTIVE = "in the scheduler"
    WITHDRAWN = "withdrawn by its prefill node, reason not yet received"
    DRAINING = "ended, slices may still be written"


@dataclass(eq=False)
class _Attempt(Attempt):
    request: DecodeRequest
    phase: Phase = Phase.NO_OFFER
    offer: Offer | None = None
    block_hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    """Hashes of all blocks of its prompt, set once an offer with the same last hash has come."""
    prefill_identity: Identity = b""
    first_blocks: list[int] = field(default_factory=list[int])
    """For each block table, the first block that the prefill node sends."""
    first_token: int | None = None
    first_token_s: float = 0.0
    has_reported: bool = False
    """A token was sent to the router."""
    received_bytes: int = 0
    withdrawal_deadline_s: float = math.inf
    """Deadline for its prefill node's reason for withdrawing the blocks."""


class DecodeNode(NodeCore[_Attempt]):
    """All attempts of one decode node. Invariant: when `attempts` is empty, no block is used."""

    def __init__(
        self, parts: CoreParts, transfers: NodeTransfers, *, early_s: float, shared_cores: bool = False
    ) -> None:
        """`early_s`: seconds that a prefill node's message waits for the router's request, or a withdrawal of its
        blocks for the reason. `shared_cores`: prefill nodes compute on the same cores, so that steps are paced.
        """
        super().__init__(parts, transfers)
        self.deferred: deque[_Attempt] = deque()
        self.early = EarlyMessages(early_s)
        self._hand_ons = HandOnQueue()
        self._shared_cores = shared_cores
        self._generated_tokens = self._local_prefills = 0

    # ------------------------------------------------------------ events

    def handle(self, event: object) -> None:
        match event:
            case FromClient(identity, DecodeRequest() as request):
                self._accept(identity, request)
            case FromClient(identity, Offer() | PrefillDone() as message):
                self._from_prefill(identity, message)
            case FromClient(_, TransferAbort(key, code, message)):
                self._prefill_gave_up(key, code, message)
            case FromClient(_, Abort(key)):
                self._end(self.attempts.get(key), "aborted")
            case Opened(key):
                self._send_grant(self.attempts[key])
            case Received(key) as received:
                for moved in received.traffic:
                    self._relayed_by[moved.transport] += moved.size_bytes
                self._received(self.attempts[key], received)
            case ReceiveFailed(key, error):
                self._receive_failed(self.attempts[key], error)
            case DestinationReleased(key):
                self._destination_released(self.attempts[key])
            case ClientLost(identity):
                super().handle(event)
                for attempt in [a for a in self.attempts.values() if a.prefill_identity == identity]:
                    if attempt.phase is not Phase.ACTIVE:  # one in the scheduler needs nothing more from it
                        self._fail(attempt, PeerLost("the prefill node has been silent past its lease"))
            case _:
                super().handle(event)

    def _describe(self, attempt: _Attempt) -> dict[str, Any]:
        return {
            "state": (attempt.seq.state if attempt.phase is Phase.ACTIVE else attempt.phase).value,
            "prompt_tokens": attempt.seq.tokens.prompt_len,
            "generated_tokens": attempt.seq.tokens.num_generated,
            "prefill_node": None if attempt.request.prefill is None else attempt.request.prefill.node_id,
        }

    def on_time(self, now_s: float) -> None:
        self._refuse_early(self.early.expired(now_s))
        for attempt in [a for a in self.attempts.values() if now_s > a.withdrawal_deadline_s]:
            self._transfers_failed += 1
            self._fail(attempt, TransferAborted("the prefill node withdrew its blocks without a reason"))
        if not self.adapters.is_settled:
            for attempt in self.attempts.values():
                if attempt.phase is Phase.NO_OFFER and self.adapters.makes_room(attempt.seq.request.adapter):
                    attempt.seq.adapter_id = 0  # its offer may queue behind requests that wait for an adapter slot
        super().on_time(now_s)

    @property
    def has_deadlines(self) -> bool:
        return bool(self.early) or super().has_deadlines

    def step(self) -> bool:
        self._grant_deferred()
        self._hand_on()
        scheduler = self.scheduler
        if self.clock() < self.rests_until_s and not scheduler.waiting:
            return False
        has_worked = super().step()
        if self._shared_cores and scheduler.running and (coming := self._num_in_prefill()):
            self.rests_until_s = self.clock() + rest_s(self._timer.step_s, len(scheduler.running), coming)
        return has_worked

    def _num_in_prefill(self) -> int:
        """Prompts that prefill nodes compute or will. While an offered one waits for room here, those without an offer do not count."""
        coming = [a for a in self.attempts.values() if a.phase not in (Phase.ACTIVE, Phase.DRAINING)]
        return sum(
            a.first_token is None and (a.offer is not None or self.scheduler.next_reserved is None) for a in coming
        )

    # ------------------------------------------------------------ admission

    def _accept(self, identity: Identity, request: DecodeRequest) -> None:
        seq = self.admit(identity, request)
        if seq is None:
            return
        attempt = _Attempt(identity, seq, seq.arrival_s + request.timeout_s, request)
        self.attempts[request.key] = attempt
        if request.prefill is None:
            self._local_prefills += 1
            attempt.phase = Phase.ACTIVE
        self.prepare(attempt)
        for prefill_identity, message in self.early.take(request.key):
            self._from_prefill(prefill_identity, message)

    def _from_prefill(self, identity: Identity, message: Offer | PrefillDone) -> None:
        attempt = self.attempts.get(message.key)
        if attempt is None:
            self._refuse_early(self.early.keep(identity, message, self.clock()))
        elif isinstance(message, Offer):
            self._offered(attempt, identity, message)
        else:
            self._prefill_done(attempt, message)

    def _refuse_early(self, messages: Messages) -> None:
        error = TransferAborted("the decode node has no request for this attempt, or has ended it")
        for identity, message in messages:
            if isinstance(message, Offer):
                self.send_buffer.reply(identity, TransferAbort(message.key, error.code, error.message))

    def _offered(self, attempt: _Attempt, identity: Identity, offer: Offer) -> None:
        if attempt.phase is not Phase.NO_OFFER:
            return
        attempt.prefill_identity, attempt.offer = identity, offer
        attempt.mark("offer", self.clock())
        seq = attempt.seq
        hashes = hash_blocks(seq.root, seq.tokens.ids, parents=seq.full_block_hashes(), include_partial=True)
        try:
            expected = attempt.request.prefill
            if expected is None or offer.src.incarnation != expected.incarnation:
                raise PeerLost(
                    f"the offer is from {offer.src.node_id}/{offer.src.incarnation}, not from the chosen prefill node"
                )
            check_compatible(offer.layout, self.layout)
            if offer.num_tokens != seq.num_tokens or offer.last_hash != hashes[-1]:
                raise HandshakeRefused("the offered block hashes do not match this request's tokens")
            self._has_adapter(attempt)
        except KvRelayError as error:
            self._fail(attempt, error)
            return
        attempt.phase, attempt.block_hashes = Phase.DEFERRED, hashes
        insert_by_priority(self.deferred, attempt, lambda each: each.seq.request.priority)

    def _grant_deferred(self) -> None:
        """Grant deferred offers by priority, by their tenants' shares, then in their order, as far as there is room. Those that
        wait for an adapter get no blocks: the requests that still use the adapter to be evicted may need them."""
        self.scheduler.next_reserved = None
        ready = [each for each in self.deferred if each.seq.state is not SequenceState.AWAITING_ADAPTER]
        while ready:
            attempt = min(ready, key=lambda each: self.scheduler.shares.turn(each.seq))
            ready.remove(attempt)
            first_blocks = self.scheduler.reserve(attempt.seq)
            if first_blocks is None:
                self.scheduler.next_reserved = attempt.seq
                return
            self.deferred.remove(attempt)
            self._grant(attempt, first_blocks)

    def _grant(self, attempt: _Attempt, first_blocks: list[int]) -> None:
        offer = attempt.offer
        assert offer is not None
        attempt.phase = Phase.RECEIVING
        attempt.first_blocks = first_blocks
        blocks = [list(each) for each in attempt.seq.blocks.tables]
        opened = self.transfers.open_destination(
            TransferPlan(attempt.seq.key, blocks, first_blocks, attempt.block_hashes, self.transfer_timeout_s),
            offer.src,
            offer.layout,
            timeline=attempt.seq.request.timeline,
        )
        attempt.mark("grant", self.clock())
        if opened:
            self._send_grant(attempt)

    def _send_grant(self, attempt: _Attempt) -> None:
        if attempt.phase is Phase.RECEIVING:
            blocks = [pack_ids(each) for each in attempt.seq.blocks.tables]
            grant = Grant(attempt.seq.key, self.me, self.layout, attempt.first_blocks, blocks, PROTOCOL_VERSION)
            self.send_buffer.reply(attempt.prefill_identity, grant)

    # ------------------------------------------------------------ arrival

    def _prefill_done(self, attempt: _Attempt, done: PrefillDone) -> None:
        if done.finish_reason is not None:
            self._end(attempt, "first token")  # the router has the whole answer from the prefill node
            return
        if not 0 <= done.token_id < self.vocab_size:
            self._fail(attempt, ProtocolError(f"the first token {done.token_id} is outside the vocabulary"))
            return
        attempt.first_token, attempt.first_token_s = done.token_id, self.clock()
        attempt.mark("first_token", attempt.first_token_s)
        self._join_if_complete(attempt)

    def _received(self, attempt: _Attempt, received: Received) -> None:
        attempt.received_bytes = received.bytes_received
        self._relayed_bytes += received.bytes_received
        attempt.mark_layers(received.layers)
        attempt.mark("received", self.clock())
        self.send_buffer.reply(attempt.prefill_identity, TransferReceived(attempt.seq.key, received.bytes_received))

    def _receive_failed(self, attempt: _Attempt, error: Exception) -> None:
        if attempt.phase is Phase.DRAINING:
            return  # ended before; the receiver learnt of it later
        if isinstance(error, TransferAborted) and attempt.phase is Phase.RECEIVING:
            # The prefill node's attempt is over, perhaps with the whole answer, which comes over the slower control link.
            attempt.phase = Phase.WITHDRAWN
            attempt.withdrawal_deadline_s = self.clock() + self.early.keep_s
            self.transfers.abort(attempt.seq.key)
            return
        self._transfers_failed += 1
        self._fail(attempt, error if isinstance(error, KvRelayError) else CorruptSlice(str(error)))

    def _destination_released(self, attempt: _Attempt) -> None:
        if attempt.phase is Phase.DRAINING:
            self.scheduler.end(attempt.seq, "ended before its KV was complete")
            del self.attempts[attempt.seq.key]
            return
        if attempt.phase is Phase.WITHDRAWN:
            self.scheduler.end(attempt.seq, "withdrawn by its prefill node")
            return
        attempt.phase = Phase.ARRIVED
        assert attempt.offer is not None
        blocks = [table[first:] for table, first in zip(attempt.seq.blocks.tables, attempt.first_blocks, strict=True)]
        self._hand_ons.add(attempt.seq.key, received_once(self.layout, attempt.offer.layout, blocks))
        self._join_if_complete(attempt)

    def _hand_on(self) -> None:
        """Choose what the next step hands on."""
        if self._hand_ons and not (self.scheduler.running and self.handed_on):
            parts, complete = self._hand_ons.take(MOST_BLOCKS if self.scheduler.running else None)
            self.handed_on += parts
            for key in complete:
                self._join_if_complete(self.attempts[key])

    def on_ready(self, attempt: _Attempt) -> None:
        if attempt.request.prefill is None:
            self.scheduler.add(attempt.seq)
        else:
            self._join_if_complete(attempt)

    def _join_if_complete(self, attempt: _Attempt) -> None:
        """Let it generate, if its KV, its first token, its adapter and its grammar are here."""
        seq, first_token = attempt.seq, attempt.first_token
        is_here = attempt.phase is Phase.ARRIVED and seq.key not in self._hand_ons
        if not is_here or first_token is None or seq.tokens.lacks_grammar:
            return
        attempt.phase = Phase.ACTIVE
        seq.first_step_s = self.clock()
        self.scheduler.join(seq, first_token)
        try:
            seq.tokens.advance_grammar()
        except KvRelayError as error:
            self._fail(attempt, error)

    # ------------------------------------------------------------ tokens

    def on_tokens(self, attempt: _Attempt, done: SequenceOutput) -> None:
        self._generated_tokens += len(done.tokens)
        seq = attempt.seq
        stats = None if attempt.has_reported else self._stats(attempt)
        attempt.has_reported = True
        self.send_buffer.tokens(attempt.identity, token_chunk(done, stats))
        if done.finish_reason is not None:
            del self.attempts[seq.key]

    def _stats(self, attempt: _Attempt) -> AttemptStats:
        seq, now_s = attempt.seq, self.clock()
        started_s = seq.first_step_s if seq.first_step_s is not None else now_s
        local = attempt.request.prefill is None
        return AttemptStats(
            cached_tokens=seq.cached_tokens,
            relayed_bytes=attempt.received_bytes,
            queue_s=started_s - seq.arrival_s,
            prefill_s=now_s - started_s if local else 0.0,
            computed_tokens=seq.num_tokens - 1 - seq.cached_tokens if local else 0,
            transfer_s=0.0 if local else started_s - attempt.first_token_s,
            timeline=attempt.timeline,
        )

    # ------------------------------------------------------------ endings

    def _prefill_gave_up(self, key: AttemptKey, code: str, message: str) -> None:
        """The prefill node tells the router; an attempt that is in the scheduler continues."""
        self.early.take(key)
        attempt = self.attempts.get(key)
        if attempt is not None and attempt.phase is not Phase.ACTIVE:
            log.warning("%s: aborted by the prefill node: %s: %s", key, code, message)
            self._end(attempt, code)

    def _fail(self, attempt: _Attempt | None, error: KvRelayError) -> None:
        """Tell the router, and the prefill node if it still sends; then end the attempt."""
        if attempt is None or attempt.phase is Phase.DRAINING:
            return
        key = attempt.seq.key
        log.warning("%s failed: %s", key, error.message)
        self.send_buffer.reply(attempt.identity, AttemptFailed(key, error.code, error.message))
        if attempt.offer is not None and attempt.phase is not Phase.ACTIVE:
            self.send_buffer.reply(attempt.prefill_identity, TransferAbort(key, error.code, error.message))
        self._end(attempt, error.code)

    def _end(self, attempt: _Attempt | None, reason: str) -> None:
        """Forget an attempt and free its blocks; blocks that are being written are freed when the receiver releases them."""
        if attempt is None or attempt.phase is Phase.DRAINING:
            return
        if attempt.phase is Phase.RECEIVING:
            attempt.phase = Phase.DRAINING
            self.transfers.abort(attempt.seq.key)
            return
        if attempt.phase is Phase.WITHDRAWN and attempt.seq.key in self.scheduler.reserved:
            attempt.phase, attempt.withdrawal_deadline_s = Phase.DRAINING, math.inf
            return
        if attempt.phase is Phase.DEFERRED:
            self.deferred.remove(attempt)
        self._hand_ons.drop(attempt.seq.key)
        self.scheduler.end(attempt.seq, reason)
        del self.attempts[attempt.seq.key]

    def _measure_load(self, **own: Any) -> NodeLoad:
        # An ended attempt may still run until its last step is done.
        incoming = len(self.attempts) - len(self.scheduler.running) - len(self.scheduler.waiting)
        counters = {"generated_tokens": self._generated_tokens, "local_prefills": self._local_prefills}
        return super()._measure_load(waiting=max(0, incoming), **counters, **own)
