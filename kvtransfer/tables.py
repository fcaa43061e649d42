"""All transfers of one rank, by direction: refusal of late messages, deadlines, and exactly one release for each. Pure.

`kvtransfer.transfer_end` turns orders and messages into method calls here, and reports the events that `take_events` returns.
A transfer lives from `open` to its `...Released` event. Calls and messages that name no live transfer are ignored or
refused, so late messages of an older attempt or incarnation have no effect. Used by one I/O thread.
"""

from __future__ import annotations

from common.base.errors import CorruptSlice, KvRelayError, PeerLost, TransferAborted, TransferError, TransferTimedOut
from common.control.messages import AttemptKey, Grant
from common.engine.kv_transfer import (
    DestinationReleased,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferEvent,
)
from common.kv.rank_layout import KVLayout
from kvtransfer.receive_state import Claim, ReceiveState
from kvtransfer.send_state import Batch, SendState
from kvtransfer.wire import SliceHeader


class SendTable:
    """The attempts that one rank is sending.

    Invariant: one `SourceReleased` per `open`; after it, no `take` and no batch in use.
    """

    def __init__(self, layout: KVLayout, rank: int, num_blocks: int) -> None:
        self._layout = layout
        self._rank = rank
        self._num_blocks = num_blocks
        self._live: dict[AttemptKey, SendState] = {}
        self._ending: dict[AttemptKey, Exception] = {}
        """Attempts that failed while a batch was in use, and why; released when that batch is no longer read."""
        self._events: list[TransferEvent] = []

    def open(self, order: OpenSourceOrder) -> None:
        """Start a transfer, whose key must not be live; one that contradicts itself is released at once."""
        key = order.plan.key
        assert key not in self._live
        try:
            self._live[key] = SendState(order, self._layout, self._rank, self._num_blocks)
        except TransferError as error:
            self._events.append(SourceReleased(key, 0, error))

    def grant(self, grant: Grant, now: float) -> list[int]:
        """The destination ranks to send to from now on; none if the grant is late, refused, or needs nothing from this rank."""
        state = self._open_state(grant.key)
        if state is None or state.granted:
            return []
        try:
            state.grant(grant, now)
        except TransferError as error:
            self.fail(grant.key, error)
            return []
        self._release_if_done(state)
        return [] if state.complete else state.destinations

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int, now: float) -> bool:
        """Returns whether something may be ready to send now."""
        state = self._open_state(key)
        if state is None:
            return False
        try:
            state.blocks_final(layer, num_blocks, now)
        except TransferError as error:
            self.fail(key, error)
            return False
        return state.granted

    @property
    def ending(self) -> list[AttemptKey]:
        """Attempts that have failed but still have a batch in use."""
        return list(self._ending)

    def take(self, key: AttemptKey, dst_rank: int, *, max_bytes: int, min_bytes: int = 1, now: float) -> Batch | None:
        """The result of `SendState.take`; None for a transfer that is not live."""
        state = self._open_state(key)
        return None if state is None else state.take(dst_rank, max_bytes=max_bytes, min_bytes=min_bytes, now=now)

    def overdue(self, now: float) -> list[AttemptKey]:
        """Attempts with slices that were held back too long to fill a larger message."""
        return [key for key, state in self._live.items() if state.overdue(now)]

    def state_of(self, batch: Batch) -> SendState:
        """The state of the attempt of a batch in use."""
        return self._live[batch.key]

    def sent(self, batch: Batch, now: float) -> None:
        """The source of `batch` is not read any more: it was sent, or its transfer has failed. Called before its
        `acknowledged`."""
        state = self._live[batch.key]
        state.sent(batch, now)
        self._release_if_done(state)

    def dropped(self, batch: Batch) -> None:
        """The source of `batch` is not read any more, but its destination did not get it; its attempt has failed."""
        state = self._live[batch.key]
        state.drop(batch.size_bytes)
        self._release_if_done(state)

    def acknowledged(self, batch: Batch, now: float) -> None:
        """The receiver has taken `batch`, after `sent`. Ignored if its transfer is not live any more."""
        state = self._open_state(batch.key)
        if state is not None and state.plan is batch.plan:
            state.acknowledged(now)
            self._release_if_done(state)

    def progressed(self, key: AttemptKey, now: float) -> None:
        """Restart the deadline: the receiver has taken an earlier message on this connection. Ignored if not live."""
        state = self._open_state(key)
        if state is not None:
            state.progress(now)

    def refused(self, batch: Batch, error: Exception) -> None:
        """The receiver refused `batch`. Ignored if its transfer is not live any more."""
        state = self._open_state(batch.key)
        if state is not None and state.plan is batch.plan:
            self.fail(batch.key, error)

    def fail(self, key: AttemptKey, error: Exception) -> None:
        """Stop an attempt that was aborted or refused, or whose peer is lost. Ignored if not live."""
        state = self._open_state(key)
        if state is not None:
            self._ending[key] = error
            self._release_if_done(state)

    def fail_all(self, error: Exception) -> None:
        """Stop every attempt."""
        for key in list(self._live):
            self.fail(key, error)

    def drop_batches(self) -> None:
        """Treat every batch in use as dropped; for an I/O thread that failed between two steps."""
        for state in list(self._live.values()):
            state.drop(state.in_use_bytes)
            if state.plan.key in self._ending:
                self._release_if_done(state)

    def expire(self, now: float) -> None:
        """Stop every attempt that has made no progress for too long."""
        for key, state in list(self._live.items()):
            if state.deadline is not None and state.deadline <= now:
                self.fail(key, TransferTimedOut(f"{key}: no progress for {state.plan.timeout_s} s"))

    def next_deadline(self, now: float) -> float | None:
        """When `expire` or `overdue` must be called next. Failed attempts have no deadline any more."""
        granted = ((state, state.deadline) for key, state in self._live.items() if key not in self._ending)
        times = (min(deadline, state.overdue_next(now)) for state, deadline in granted if deadline is not None)
        return min(times, default=None)

    def take_events(self) -> list[TransferEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _open_state(self, key: AttemptKey) -> SendState | None:
        return None if key in self._ending else self._live.get(key)

    def _release_if_done(self, state: SendState) -> None:
        key = state.plan.key
        error = self._ending.get(key)
        if state.complete or (error is not None and not state.in_use_bytes):
            del self._live[key]
            self._ending.pop(key, None)
            self._events.append(SourceReleased(key, state.bytes_sent, None if state.complete else error))


class ReceiveTable:
    """The attempts that one rank expects.

    Invariant: one `DestinationReleased` per `open`; after it, no new claim and none in use; before it, at most one of
    `Received` and `ReceiveFailed`.
    """

    def __init__(self, layout: KVLayout, rank: int, num_blocks: int, incarnation: str) -> None:
        """incarnation: this node's; messages for another one are refused."""
        self._layout = layout
        self._rank = rank
        self._num_blocks = num_blocks
        self._incarnation = incarnation
        self._live: dict[AttemptKey, ReceiveState] = {}
        self._failed: dict[AttemptKey, ReceiveState | None] = {}
        """Reported as failed, to be aborted by the caller; None if the transfer could not even start."""
        self._aborted: dict[AttemptKey, ReceiveState] = {}
        """Aborted while a claim was in use; released when the claim is placed."""
        self._events: list[TransferEvent] = []

    def open(self, order: OpenDestinationOrder, now: float) -> None:
        """Expect a transfer, whose key must not be live; one that contradicts itself fails at once."""
        key = order.plan.key
        assert not any(key in attempts for attempts in (self._live, self._failed, self._aborted))
        try:
            state = ReceiveState(order, self._layout, self._rank, self._num_blocks, now)
        except TransferError as error:
            self._failed[key] = None
            self._events.append(ReceiveFailed(key, error))
            return
        self._live[key] = state
        self._events.append(Opened(key))
        self._finish_if_complete(state)

    def accept(self, header: SliceHeader, payload_bytes: int) -> Claim:
        """The claim to write for a message.

        Raises: TransferAborted or PeerLost if no live transfer expects it (nothing changed); CorruptSlice if it
        contradicts its transfer, which has then failed.
        """
        state = self._expecting(header)
        try:
            return state.claim(header, payload_bytes)
        except CorruptSlice as error:
            self._fail(state, error)
            raise

    def placed(self, claim: Claim, now: float) -> None:
        """`claim` was written, or writing it was given up."""
        state = self._find(claim.key)
        state.placed(claim, now)
        for other in self._live.values():
            if other.src_incarnation == state.src_incarnation:
                other.progressed(now)
        if claim.key in self._aborted and not state.in_use_bytes:
            del self._aborted[claim.key]
            self._events.append(DestinationReleased(claim.key))
        elif claim.key in self._live:
            self._finish_if_complete(state)

    def abort(self, key: AttemptKey) -> None:
        """Stop this attempt. Ignored if not live."""
        if key in self._failed:
            state = self._failed.pop(key)
        elif key in self._live:
            state = self._live.pop(key)
        else:
            return
        if state is not None and state.in_use_bytes:
            self._aborted[key] = state
        else:
            self._events.append(DestinationReleased(key))

    def abort_all(self) -> None:
        """Stop every attempt."""
        for key in [*self._live, *self._failed]:
            self.abort(key)

    def fail(self, key: AttemptKey, error: KvRelayError) -> None:
        """Report an attempt as failed. Ignored if not live."""
        state = self._live.get(key)
        if state is not None:
            self._fail(state, error)

    def fail_all(self, error: KvRelayError) -> None:
        """Report every live attempt as failed."""
        for state in list(self._live.values()):
            self._fail(state, error)

    def drop_claims(self) -> None:
        """Treat every claim in use as dropped; for an I/O thread that failed between two steps."""
        for state in [*self._live.values(), *self._failed.values()]:
            if state is not None:
                state.in_use_bytes = 0
        for key in self._aborted:
            self._events.append(DestinationReleased(key))
        self._aborted.clear()

    def expire(self, now: float) -> None:
        """Fail every attempt that has made no progress for too long."""
        for key, state in list(self._live.items()):
            if state.deadline is not None and state.deadline <= now:
                missing = f"{state.missing} (layer, head, block) cells missing"
                self._fail(state, TransferTimedOut(f"{key}: no slice arrived for {state.plan.timeout_s} s, {missing}"))

    def next_deadline(self) -> float | None:
        """When `expire` must be called next."""
        return min((state.deadline for state in self._live.values() if state.deadline is not None), default=None)

    def take_events(self) -> list[TransferEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _expecting(self, header: SliceHeader) -> ReceiveState:
        """The live transfer that a message belongs to. Raises: see `accept`."""
        if header.dst_incarnation != self._incarnation:
            raise PeerLost(f"{header.key} is for incarnation {header.dst_incarnation}, not {self._incarnation}")
        if header.dst_rank != self._rank:
            raise TransferAborted(f"{header.key} is for rank {header.dst_rank}, not {self._rank}")
        state = self._live.get(header.key)
        if state is None:
            raise TransferAborted(f"{header.key} is not expected here")
        if header.src_incarnation != state.src_incarnation:
            raise TransferAborted(f"{header.key} is expected from another incarnation than {header.src_incarnation}")
        return state

    def _find(self, key: AttemptKey) -> ReceiveState:
        state = self._live.get(key) or self._aborted.get(key) or self._failed.get(key)
        assert state is not None, f"{key} has no claim in use"
        return state

    def _fail(self, state: ReceiveState, error: KvRelayError) -> None:
        key = state.plan.key
        del self._live[key]
        self._failed[key] = state
        self._events.append(ReceiveFailed(key, error))

    def _finish_if_complete(self, state: ReceiveState) -> None:
        if state.complete:
            key = state.plan.key
            del self._live[key]
            self._events.append(Received(key, state.bytes_received, layers=tuple(state.layers.items())))
            self._events.append(DestinationReleased(key))
