"""The part of a node's core that both roles share: accepting attempts, running steps, deadlines, load. Engine thread.

A role adds how it handles admission, tokens, failure and end of its attempts.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from llguidance import LLMatcher

from common.base.clock import Clock
from common.base.errors import AdapterMissing, EngineError, KvRelayError, Overloaded, RankLost, Unavailable
from common.base.hashing import root_hash
from common.base.sentences import counted
from common.control.links import Identity
from common.control.messages import (
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    NodeLoad,
    PeerRef,
    PrefillRequest,
    TokenBatch,
)
from common.engine.executor import Executor, StepDone, StepFailed
from common.engine.grammar.compile import COMPILE_TIMEOUT_S
from common.engine.grammar.compiler import GrammarCompiled, GrammarCompiler
from common.engine.scheduled_step import ScheduledStep, SequenceOutput
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState
from common.engine.step import HandedOn, StepOutput, with_handed_on
from common.kv.rank_layout import KVLayout
from common.node.adapter_table import AdapterLoaded, AdapterTable
from common.node.attempt import Attempt, prompt_chunks
from common.node.events import ClientLost, FromClient, FromPeer, SendBuffer, brief
from common.node.request_checks import check_request
from common.node.step_timer import StepTimer
from common.node.transfers import NodeTransfers

log = logging.getLogger(__name__)

AttemptT = TypeVar("AttemptT", bound=Attempt)


@dataclass(frozen=True, kw_only=True)
class CoreParts:
    """The parts that the core of either role is built from."""

    me: PeerRef
    layout: KVLayout
    vocab_size: int
    scheduler: Scheduler
    executor: Executor
    grammars: GrammarCompiler
    send_buffer: SendBuffer
    clock: Clock
    max_accepted: int
    """Attempts that the node holds at once; further ones are refused as overload."""
    transfer_timeout_s: float
    """Idle timeout of a KV transfer, in seconds."""
    adapters: AdapterTable = field(default_factory=AdapterTable)
    handed_on: list[HandedOn] = field(default_factory=list[HandedOn])
    """For the next step, of the model or of its draft head: `StepInput.handed_on`."""


class NodeCore(ABC, Generic[AttemptT]):
    """All attempts of one node. Invariants: every started step ends once, as done or failed; when `attempts` is
    empty, no block is used.
    """

    def __init__(self, parts: CoreParts, transfers: NodeTransfers) -> None:
        self.transfers = transfers
        self.me = parts.me
        self.layout = parts.layout
        self.vocab_size = parts.vocab_size
        self.scheduler = parts.scheduler
        self.executor = parts.executor
        self.grammars = parts.grammars
        self.adapters = parts.adapters
        self.send_buffer = parts.send_buffer
        self.clock = parts.clock
        self.max_accepted = parts.max_accepted
        self.transfer_timeout_s = parts.transfer_timeout_s
        self.attempts: dict[AttemptKey, AttemptT] = {}
        pool = parts.scheduler.pool
        self.load = NodeLoad(
            kv_blocks_total=pool.num_blocks // pool.num_tables, kv_blocks_cached=pool.num_cached // pool.num_tables
        )
        self.rests_until_s = 0.0
        """Time at which `step` may have work again without an event; a time in the past means nothing."""
        self.handed_on = parts.handed_on
        self._scheduled: dict[int, ScheduledStep] = {}
        """Plans of the steps in flight, by step id."""
        self._timer = StepTimer(depth=parts.scheduler.config.depth)
        self._prompt_tokens = 0
        self._relayed_bytes = 0
        self._relayed_by: Counter[str] = Counter()
        self._transfers_failed = 0

    # ------------------------------------------------------------ what a role adds

    @abstractmethod
    def on_ready(self, attempt: AttemptT) -> None:
        """The attempt has its adapter and its grammar, if the request names any: it can take part in steps."""

    @abstractmethod
    def on_tokens(self, attempt: AttemptT, done: SequenceOutput) -> None:
        """A step sampled the attempt's next tokens, `done.tokens`, one or more."""

    @abstractmethod
    def _fail(self, attempt: AttemptT | None, error: KvRelayError) -> None:
        """Report the failure to the router and the other node, then end the attempt. Ignored for None or an ended attempt."""

    @abstractmethod
    def _end(self, attempt: AttemptT | None, reason: str) -> None:
        """Free what the attempt holds, now or when its transfer releases it. Ignored for None or an ended attempt."""

    @abstractmethod
    def _describe(self, attempt: AttemptT) -> dict[str, Any]:
        """The attempt's state and progress, for operators."""

    def on_started(self, attempt: AttemptT) -> None:
        """The attempt's blocks are allocated and it is part of the step that starts now."""

    # ------------------------------------------------------------ events and time

    def handle(self, event: object) -> None:
        """Handle one event; a role handles its own events first."""
        match event:
            case StepDone(output):
                self.process(output)
            case StepFailed(step_id, error):
                self._step_failed(step_id, error)
            case GrammarCompiled(key, result):
                self._grammar_compiled(key, result)
            case AdapterLoaded():
                self.adapters.loaded(event)
            case ClientLost(identity):
                # The router may only have been slow: then it must learn that its attempts are over.
                for attempt in [a for a in self.attempts.values() if a.identity == identity]:
                    self._fail(attempt, Unavailable("the router was silent past its lease"))
            case _:
                sender = {"peer": event.sender} if isinstance(event, FromClient | FromPeer) else {}
                log.warning("%s ignores an unexpected event: %s", type(self).__name__, brief(event), extra=sender)

    def on_time(self, now_s: float) -> None:
        for attempt in [a for a in self.attempts.values() if now_s > a.deadline_s]:
            self._end(attempt, "past its deadline")
        for attempt in [a for a in self.attempts.values() if now_s > a.grammar_deadline_s]:
            self._fail(attempt, Overloaded(f"no grammar was compiled within {COMPILE_TIMEOUT_S:g} s"))
        if not self.adapters.is_settled:
            in_use = {attempt.seq.adapter_id for attempt in self.attempts.values()}
            in_use |= {seq.adapter_id for scheduled in self._scheduled.values() for seq in scheduled.seqs}
            self.adapters.settle(in_use, now_s)
        self.load = self._measure_load()

    @property
    def has_deadlines(self) -> bool:
        return bool(self.attempts) or not self.adapters.is_settled

    def fail_all(self, error: KvRelayError) -> None:
        """End all attempts with this error."""
        for attempt in list(self.attempts.values()):
            self._fail(attempt, error)

    def describe_attempts(self) -> list[dict[str, Any]]:
        """For operators: every attempt with its state and age."""
        now_s = self.clock()
        return [
            {"attempt": str(key), "age_s": round(now_s - attempt.seq.arrival_s, 3), **self._describe(attempt)}
            for key, attempt in self.attempts.items()
        ]

    def admit(self, identity: Identity, request: PrefillRequest | DecodeRequest) -> Sequence | None:
        """The sequence of a new request; None, after reporting the reason to the router, if it cannot be served."""
        if request.key in self.attempts:
            log.warning("%s was received twice; the first one continues", request.key)
            return None
        try:
            return self._sequence(request)
        except KvRelayError as error:
            self.send_buffer.reply(identity, AttemptFailed(request.key, error.code, error.message))
            return None

    def _sequence(self, message: PrefillRequest | DecodeRequest) -> Sequence:
        """The sequence of a request, if this node can ever run it.

        Raises: BadRequest for token ids, lengths or parameters that are out of range, AdapterMissing, Overloaded when the
        node has accepted its maximum of attempts.
        """
        if len(self.attempts) >= self.max_accepted:
            raise Overloaded(f"this node already has {counted(len(self.attempts), 'request')}, its maximum")
        request = message.request
        self.scheduler.config.check_length(len(request.prompt_ids) + len(message.generated_ids))
        token_ids = list(message.token_ids)  # ten times the size of the message: its length is checked before
        if request.adapter is not None:
            self.adapters.check(request.adapter)
        check_request(request, token_ids, self.vocab_size)
        sequence = Sequence(
            key=message.key,
            request=request,
            token_ids=token_ids,
            root=root_hash(self.layout.fingerprint, cache_salt=request.cache_salt, lora_id=request.lora_id),
            arrival_s=self.clock(),
            relays=isinstance(message, PrefillRequest),
            scored=len(request.prompt_ids) if isinstance(message, DecodeRequest) and message.prefill else 0,
        )
        self.scheduler.check_fits(sequence)
        return sequence

    def prepare(self, attempt: AttemptT) -> None:
        """Get the attempt's adapter, then its grammar, then call `on_ready`: at once, or when what it waits for is there.

        Raises: AdapterMissing.
        """
        if self._has_adapter(attempt) and self._has_grammar(attempt):
            self.on_ready(attempt)

    def _has_adapter(self, attempt: AttemptT) -> bool:
        """Whether its adapter, if it has one, is in memory. If not, it waits, and `prepare` follows when it is loaded.

        Raises: AdapterMissing.
        """
        seq, adapter = attempt.seq, attempt.seq.request.adapter
        if adapter is None or seq.adapter_id:
            return True
        if seq.state is SequenceState.AWAITING_ADAPTER:
            return False
        self.adapters.check(adapter)
        tell = partial(self._adapter_loaded, seq.key)
        seq.adapter_id = self.adapters.take(adapter, self.clock(), tell, lambda: seq.key in self.attempts) or 0
        if not seq.adapter_id:
            seq.enter(SequenceState.AWAITING_ADAPTER, adapter.name)
        return seq.adapter_id > 0

    def _adapter_loaded(self, key: AttemptKey, result: int | KvRelayError) -> None:
        attempt = self.attempts.get(key)
        if attempt is None or attempt.seq.state is not SequenceState.AWAITING_ADAPTER:
            return  # ended meanwhile
        if isinstance(result, KvRelayError):
            self._fail(attempt, AdapterMissing(result.message))
            return
        attempt.seq.adapter_id = result
        attempt.seq.enter(SequenceState.ACCEPTED, "adapter loaded")
        self.prepare(attempt)

    def _has_grammar(self, attempt: AttemptT) -> bool:
        """Whether its grammar, if it has one, is set. If not, it waits until it is compiled, or fails."""
        seq, grammar = attempt.seq, attempt.seq.request.sampling.grammar
        if grammar is None or not seq.tokens.lacks_grammar:
            return True
        matcher = self.grammars.cached(grammar.source)
        if matcher is not None:
            return self._set_grammar(attempt, matcher)
        seq.enter(SequenceState.AWAITING_GRAMMAR, "compiled elsewhere")
        attempt.grammar_deadline_s = self.clock() + COMPILE_TIMEOUT_S
        self.grammars.compile(seq.key, grammar.source)
        return False

    def _grammar_compiled(self, key: AttemptKey, result: LLMatcher | KvRelayError) -> None:
        attempt = self.attempts.get(key)
        if attempt is None or attempt.grammar_deadline_s == math.inf:
            return  # ended meanwhile
        attempt.grammar_deadline_s = math.inf
        if isinstance(result, KvRelayError):
            self._fail(attempt, result)
        elif self._set_grammar(attempt, result):
            if attempt.seq.state is SequenceState.AWAITING_GRAMMAR:
                attempt.seq.enter(SequenceState.ACCEPTED, "grammar compiled")
            self.on_ready(attempt)

    def _set_grammar(self, attempt: AttemptT, matcher: LLMatcher) -> bool:
        try:
            attempt.seq.tokens.set_grammar(matcher, self.grammars.eos_ids)
        except KvRelayError as error:
            self._fail(attempt, error)
            return False
        return True

    # ------------------------------------------------------------ steps

    def step(self) -> bool:
        """One round of the node, after `EngineLoop` has received events: schedule, forward, process. False if there was no step."""
        scheduled = self.schedule()
        if scheduled is None:
            return False
        output = self.forward(scheduled)
        if output is not None:  # else it is received later, as `StepDone` or `StepFailed`
            self.process(output)
        return True

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can run now."""
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        for seq in scheduled.admitted:
            if seq.first_step_s is None:
                seq.first_step_s = self.clock()
            self.on_started(self.attempts[seq.key])
        self.send_buffer.flush()  # send offers and grants before the step: an answer may arrive before it is done
        return scheduled

    def forward(self, scheduled: ScheduledStep) -> StepOutput | None:
        """Have the ranks compute a step. Returns its output if they do that at once and it does not fail."""
        step = with_handed_on(scheduled.step, self.handed_on)
        self._scheduled[step.step_id] = scheduled
        self._timer.begin(step.step_id, self.clock())
        try:
            return self.executor.submit(step)
        except Exception as error:  # one step's failure must not end the node
            self._step_failed(step.step_id, error)
            return None

    def process(self, output: StepOutput) -> None:
        """Pass what a step computed to its sequences, and their tokens to the role."""
        scheduled = self._scheduled.pop(output.step_id)
        counts, num_decode_seqs = scheduled.step.query_lens, scheduled.step.num_decode_seqs
        took_s = self._timer.end(
            output.step_id,
            self.clock(),
            decodes=num_decode_seqs > 0,
            prompts=num_decode_seqs < len(counts),
            tokens=sum(counts),
        )
        self._prompt_tokens += sum(counts[num_decode_seqs:])
        self._prompt_tokens += sum(
            n for seq, n in zip(scheduled.seqs, counts[:num_decode_seqs], strict=False) if seq.relays
        )
        for seq in scheduled.seqs[num_decode_seqs:]:
            if seq.request.timeline and (attempt := self.attempts.get(seq.key)) is not None:
                attempt.mark("chunk", self.clock(), seq.progress.num_scheduled)
        outputs = self.scheduler.update(scheduled, output.sampled, output.prompt_logprobs)
        if num_decode_seqs == len(counts):
            tokens = sum([len(done.tokens) for done in outputs])
            self.scheduler.drafting.timed(num_decode_seqs, sum(counts), tokens, took_s)
        for done in outputs:
            if done.prompt_logprobs:
                for chunk in prompt_chunks(done):
                    self.send_buffer.reply(self.attempts[done.seq.key].identity, TokenBatch([chunk]))
            if done.error is not None:
                self._fail(self.attempts[done.seq.key], done.error)
            elif done.tokens:
                self.on_tokens(self.attempts[done.seq.key], done)

    def _step_failed(self, step_id: int, error: Exception) -> None:
        if isinstance(error, RankLost):
            raise error  # ends the engine loop and the node: ranks share fate
        log.error("step %d failed", step_id, exc_info=error)
        self._timer.drop(step_id)
        scheduled = self._scheduled.pop(step_id)
        self.scheduler.fail(scheduled)
        for seq in scheduled.seqs:
            self._fail(self.attempts.get(seq.key), EngineError(f"the step failed: {error}"))

    def _measure_load(self, *, waiting: int = 0, **own: Any) -> NodeLoad:
        """The present load. `waiting`: attempts that are not in the scheduler yet; `own`: fields that only a role knows."""
        scheduler, pool, drafting = self.scheduler, self.scheduler.pool, self.scheduler.drafting
        unstarted = sum(seq.num_uncomputed - seq.likely_cached for seq in scheduler.waiting)
        # The KV of a generating sequence's last token is never computed yet.
        begun = sum(lacking for seq in scheduler.running.values() if (lacking := seq.num_uncomputed) > 1)
        return NodeLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + waiting,
            deferred=waiting,
            queued_tokens=unstarted + begun,
            kv_blocks_used=-(-pool.num_used // pool.num_tables),
            kv_blocks_cached=pool.num_cached // pool.num_tables,
            kv_blocks_total=pool.num_blocks // pool.num_tables,
            step_age_s=self._timer.age_s(self.clock()),
            prompt_tokens=self._prompt_tokens,
            prompt_busy_s=self._timer.prompt_busy_s,
            step_s=self._timer.step_s,
            steps_by_tokens=list(self._timer.by_tokens),
            step_tokens=self._timer.tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            relayed_bytes=self._relayed_bytes,
            relayed_by=dict(self._relayed_by),
            transfers_failed=self._transfers_failed,
            drafted={name: each.drafted for name, each in drafting.counts.items()},
            drafts_accepted={name: each.accepted for name, each in drafting.counts.items()},
            speculation_saved_s=drafting.saved_s,
            **own,
        )
