"""The logic of a prefill node: what it does on every event. Runs on the engine's thread, does no I/O itself.

One attempt here: queued -> admitted (blocks taken, offered to the decode node) -> computed chunk by chunk,
each layer relayed as it becomes final -> first token out -> source blocks released -> forgotten.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.engine.executor import Executor, StepDone, StepFailed
from common.engine.scheduler import Plan, Progress, Scheduler
from common.engine.sequence import Sequence
from common.engine.step import StepOutput
from common.errors import (
    EngineError,
    KvRelayError,
    NoFiniteLogits,
    PeerLost,
    RankLost,
    TransferAborted,
    Unavailable,
    from_code,
)
from common.hashing import BLOCK_SIZE, hash_blocks
from common.kv.layout import KVLayout, check_compatible
from common.node.intake import make_sequence
from common.node.meter import StepMeter
from common.node.outbox import ClientLost, FromClient, FromPeer, Outbox, PeerGone
from common.protocol import (
    Abort,
    AttemptFailed,
    AttemptKey,
    AttemptStats,
    Grant,
    NodeLoad,
    Offer,
    PeerRef,
    PrefillDone,
    PrefillRequest,
    TokenChunk,
    TransferAbort,
    TransferReceived,
)
from common.rpc import Identity
from kvtransfer.base import KVSender, OutgoingTransfer, SourceReleased
from kvtransfer.traffic import count_bytes

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Attempt:
    identity: Identity
    request: PrefillRequest
    seq: Sequence
    deadline_s: float
    offered: bool = False
    """The sender knows it: its blocks are free only after `SourceReleased`."""
    reported: bool = False
    """The router has had its first token."""
    ended: bool = False
    """Nobody wants anything of it any more; it only waits for its blocks."""


class PrefillNode:
    """All attempts of one prefill node. Invariant: when `attempts` is empty, no block is used."""

    def __init__(
        self,
        me: PeerRef,
        layout: KVLayout,
        vocab_size: int,
        scheduler: Scheduler,
        executor: Executor,
        sender: KVSender,
        outbox: Outbox,
        clock: Clock,
        *,
        max_accepted: int,
        transfer_timeout_s: float,
    ) -> None:
        self.me = me
        self.layout = layout
        self.vocab_size = vocab_size
        self.scheduler = scheduler
        self.executor = executor
        self.sender = sender
        self.outbox = outbox
        self.clock = clock
        self.max_accepted = max_accepted
        self.transfer_timeout_s = transfer_timeout_s
        self.attempts: dict[AttemptKey, _Attempt] = {}
        self._plans: dict[int, Plan] = {}
        """Steps in flight."""
        self._meter = StepMeter(depth=scheduler.config.depth)
        self.load = NodeLoad(kv_blocks_total=scheduler.pool.num_blocks)
        self._prompt_tokens = 0
        self._relayed_bytes = 0
        self._relayed_by: dict[str, int] = {}
        self._transfers_failed = 0

    # ------------------------------------------------------------ events

    def handle(self, event: object) -> None:
        match event:
            case FromClient(identity, PrefillRequest() as request):
                self._accept(identity, request)
            case FromClient(_, Abort(key)):
                self._forget(self.attempts.get(key))
            case FromPeer(incarnation, Grant() as grant):
                self._granted(incarnation, grant)
            case FromPeer(_, TransferAbort(key, code, message)):
                self._fail(self.attempts.get(key), from_code(code, message))
            case FromPeer(_, TransferReceived(key)):
                self._received(self.attempts.get(key))
            case SourceReleased(key, bytes_sent, error, traffic):
                count_bytes(self._relayed_by, traffic)
                self._released(self.attempts[key], bytes_sent, error)
            case StepDone(output):
                self._step_done(output)
            case StepFailed(step_id, error):
                self._step_failed(step_id, error)
            case ClientLost(identity):
                # It may only have been held up: then it must hear that its attempts are over.
                for attempt in [a for a in self.attempts.values() if a.identity == identity]:
                    self._fail(attempt, Unavailable("the router was silent past its lease"))
            case PeerGone(incarnation, reason):
                for attempt in [a for a in self.attempts.values() if a.request.decode.incarnation == incarnation]:
                    self._fail(attempt, PeerLost(f"decode node lost: {reason}"))
            case _:
                log.warning("a prefill node does not take %s", event)

    def describe_attempts(self) -> list[dict[str, Any]]:
        """For operators: every attempt, where it stands and how old it is."""
        now_s = self.clock()
        return [
            {
                "attempt": str(key),
                "state": self._state(attempt),
                "age_s": round(now_s - attempt.seq.arrival_s, 3),
                "prompt_tokens": attempt.seq.num_tokens,
                "computed_tokens": attempt.seq.num_computed,
                "decode_node": attempt.request.decode.node_id,
            }
            for key, attempt in self.attempts.items()
        ]

    def _state(self, attempt: _Attempt) -> str:
        if attempt.ended:
            return "ended, its blocks are still being sent"
        if attempt.reported:
            return "first token out, KV is being relayed"
        return "waiting" if attempt.seq.first_step_s is None else "computing"

    def on_time(self, now_s: float) -> None:
        for attempt in [a for a in self.attempts.values() if now_s > a.deadline_s and not a.ended]:
            self._forget(attempt)
        self.load = self._measure_load()

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        for seq in plan.admitted:
            self._offer(self.attempts[seq.key])
        self.outbox.flush()  # offers must not wait for the step: the grant can be back before its first layer is done
        self._plans[plan.step.step_id] = plan
        self._meter.begin(plan.step.step_id, self.clock())
        try:
            output = self.executor.submit(plan.step)
        except Exception as error:  # one step's failure must not end the node
            self._step_failed(plan.step.step_id, error)
            return True
        if output is not None:
            self._step_done(output)
        return True

    def _step_done(self, output: StepOutput) -> None:
        plan = self._plans.pop(output.step_id)
        self._meter.end(output.step_id, self.clock(), plan.step.query_lens)
        self._prompt_tokens += sum(plan.step.query_lens)
        for done in self.scheduler.update(plan, output.sampled):
            if done.sampled is not None and done.sampled.error is not None:
                self._fail(self.attempts[done.seq.key], NoFiniteLogits(done.sampled.error))
            elif done.sampled is not None:
                self._first_token(self.attempts[done.seq.key], done)

    # ------------------------------------------------------------ one attempt

    def _accept(self, identity: Identity, request: PrefillRequest) -> None:
        if request.key in self.attempts:
            log.warning("%s came twice, the first one goes on", request.key)
            return
        now_s = self.clock()
        try:
            seq = make_sequence(
                request,
                scheduler=self.scheduler,
                fingerprint=self.layout.fingerprint,
                vocab_size=self.vocab_size,
                accepted=len(self.attempts),
                max_accepted=self.max_accepted,
                now_s=now_s,
            )
        except KvRelayError as error:
            self.outbox.reply(identity, AttemptFailed(request.key, error.code, error.message))
            return
        self.attempts[request.key] = _Attempt(identity, request, seq, now_s + request.timeout_s)
        self.scheduler.add(seq)

    def _offer(self, attempt: _Attempt) -> None:
        seq = attempt.seq
        seq.first_step_s = self.clock()
        hashes = hash_blocks(seq.root, seq.token_ids, parents=seq.full_block_hashes(), include_partial=True)
        attempt.offered = True
        self.sender.open(
            OutgoingTransfer(
                key=seq.key,
                src_incarnation=self.me.incarnation,
                src_blocks=list(seq.blocks),
                block_hashes=hashes,
                num_tokens=seq.num_tokens,
                timeout_s=self.transfer_timeout_s,
                final_blocks=seq.num_computed // BLOCK_SIZE,
            )
        )
        self.outbox.to_peer(
            attempt.request.decode, Offer(seq.key, self.me, self.layout, seq.num_tokens, block_hashes=hashes)
        )

    def _granted(self, incarnation: str, grant: Grant) -> None:
        attempt = self.attempts.get(grant.key)
        if attempt is None or incarnation != attempt.request.decode.incarnation:
            return
        try:
            check_compatible(self.layout, grant.layout)
        except KvRelayError as error:
            self._fail(attempt, error)
            return
        self.sender.grant(grant)

    def _first_token(self, attempt: _Attempt, done: Progress) -> None:
        assert done.sampled is not None
        seq, now_s = attempt.seq, self.clock()
        started_s = seq.first_step_s if seq.first_step_s is not None else now_s
        stats = AttemptStats(
            cached_tokens=seq.cached_tokens,
            queue_s=started_s - seq.arrival_s,
            prefill_s=now_s - started_s,
            computed_tokens=seq.num_tokens - 1 - seq.cached_tokens,
        )
        logprobs = None if done.sampled.logprobs is None else [done.sampled.logprobs]
        chunk = TokenChunk(seq.key, seq.num_generated - 1, [done.sampled.token_id], logprobs, done.finish_reason, stats)
        if not attempt.ended:
            self.outbox.tokens(attempt.identity, chunk)
            self.outbox.to_peer(attempt.request.decode, PrefillDone(seq.key, done.sampled.token_id, done.finish_reason))
        attempt.reported = True
        if not attempt.offered:
            self._forget(attempt)
        elif done.finish_reason is not None:
            self.sender.abort(seq.key)  # nobody will decode: what is not yet sent need not be

    def _received(self, attempt: _Attempt | None) -> None:
        """The decode node has every slice: whether the last acks still come does not matter any more."""
        if attempt is not None and attempt.reported:
            self._forget(attempt)

    def _released(self, attempt: _Attempt, bytes_sent: int, error: Exception | None) -> None:
        attempt.offered = False
        self._relayed_bytes += bytes_sent
        if error is not None and not attempt.ended and not isinstance(error, TransferAborted):
            self._transfers_failed += 1
            self._fail(
                attempt, error if isinstance(error, KvRelayError) else EngineError(f"the transfer failed: {error}")
            )
        # Before the first token: the decode node held every block already. It is still to be computed.
        elif attempt.reported or attempt.ended:
            self._forget(attempt)

    def _fail(self, attempt: _Attempt | None, error: KvRelayError) -> None:
        """Tell both the router and the decode node, then forget."""
        if attempt is None or attempt.ended:
            return
        key = attempt.seq.key
        log.warning("%s failed: %s", key, error.message)
        self.outbox.reply(attempt.identity, AttemptFailed(key, error.code, error.message))
        self.outbox.to_peer(attempt.request.decode, TransferAbort(key, error.code, error.message))
        self._forget(attempt)

    def _forget(self, attempt: _Attempt | None) -> None:
        """Free what the attempt holds; what the sender still reads, when it says so."""
        if attempt is None:
            return
        attempt.ended = True
        if attempt.seq.key in self.scheduler.running or attempt.seq in self.scheduler.waiting:
            self.scheduler.abort(attempt.seq)
        if attempt.offered:
            self.sender.abort(attempt.seq.key)
        else:
            self.scheduler.free(attempt.seq)
            self.attempts.pop(attempt.seq.key, None)

    def _step_failed(self, step_id: int, error: Exception) -> None:
        if isinstance(error, RankLost):
            raise error  # the engine loop ends, and the node with it: its ranks share fate
        log.error("step %d failed", step_id, exc_info=error)
        self._meter.drop(step_id)
        plan = self._plans.pop(step_id)
        self.scheduler.fail(plan)
        for seq in plan.seqs:
            self._fail(self.attempts.get(seq.key), EngineError(f"the step failed: {error}"))

    def _measure_load(self) -> NodeLoad:
        scheduler = self.scheduler
        unstarted = sum(seq.num_tokens - seq.likely_cached for seq in scheduler.waiting)
        begun = sum(seq.num_uncomputed for seq in scheduler.running.values())
        return NodeLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=unstarted + begun,
            kv_blocks_used=scheduler.pool.num_used,
            kv_blocks_cached=scheduler.pool.num_cached,
            kv_blocks_total=scheduler.pool.num_blocks,
            prompt_tokens=self._prompt_tokens,
            step_age_s=self._meter.age_s(self.clock()),
            prompt_busy_s=self._meter.prompt_busy_s,
            step_s=self._meter.step_s,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            relayed_bytes=self._relayed_bytes,
            relayed_by=dict(self._relayed_by),
            transfers_failed=self._transfers_failed,
        )
