"""Which sequences run in the next step, on which blocks. Pure: no I/O, no clock, no torch.

Continuous batching under a token budget: running sequences first (one token each), then chunks of
prompts that were begun, then new ones while blocks, seats and budget last. A sequence gets the blocks
of all its known tokens when it is admitted, and one more at a time while it generates; when none is
left the youngest running sequence is preempted: it gives its blocks back and is recomputed later.

`schedule` and `update` are apart so that several steps can be in flight. Those of a pipeline's stages are each over
another *group* of the running sequences (`common.engine.microbatches`). With depth 2 a group's next step is scheduled while
its last one runs (asynchronous scheduling): a sequence takes part with the token that is just being drawn, unknown here
and known to the ranks (`StepInput.carried`). One that turns out to have ended wastes that row. It keeps its blocks until
the row is done, as does one that is aborted or has to make room; only tokens that are known name blocks for the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from common.base.errors import BadRequest
from common.base.hashing import BLOCK_SIZE
from common.control.messages import AttemptKey, FinishReason
from common.engine.build_step import Row, step_input
from common.engine.microbatches import group_weights, part_of_waiting, weight_of
from common.engine.sequence import Sequence
from common.engine.step import SampledToken, StepInput
from common.kv.layout import blocks_for
from common.kv.pool import BlockPool

T = TypeVar("T")


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds of one step and of one sequence."""

    max_model_len: int
    max_num_seqs: int
    """Sequences that hold blocks at the same time."""
    max_num_batched_tokens: int
    """Rows of one step."""
    prefill_chunk: int
    """Prompt rows of a step in which others decode; bounds what a prompt adds to their inter-token latency."""
    num_groups: int = 1
    """Parts of the running sequences that have steps of their own: as many as a pipeline has stages."""
    depth: int = 1
    """Steps in flight in every group: 1, or 2 where the next one is prepared while one runs."""

    def __post_init__(self) -> None:
        assert self.depth in (1, 2), self


@dataclass(frozen=True)
class Progress:
    """What a step did for one sequence."""

    seq: Sequence
    sampled: SampledToken | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Plan:
    """One scheduled step: what the ranks get, and the sequences behind it in the same order."""

    step: StepInput
    seqs: list[Sequence]
    admitted: list[Sequence]
    """Of `seqs`, those that got their blocks just now."""
    group: int


class Scheduler:
    """Sequences that wait, that run, and that hold blocks for KV still to arrive (`reserve`)."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: dict[AttemptKey, Sequence] = {}
        """In order of age; the last is preempted first."""
        self.reserved: dict[AttemptKey, Sequence] = {}
        self.due: Sequence | None = None
        """The next one to `reserve`, if it had to wait: those that wait behind it leave it their blocks and seats."""
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_wasted_rows = 0
        """Rows of sequences that had ended when their step was done."""
        self._steps = 0
        self._in_flight = [0] * config.num_groups
        self._next_group = 0
        self._yielding: Sequence | None = None
        """Gets no row in the step being scheduled, so that its blocks are free for an older one after its last."""

    # ------------------------------------------------------------ sequences in and out

    def check_fits(self, seq: Sequence) -> None:
        """Refuse what could never run here, before it waits.

        Raises: BadRequest naming the sizes.
        """
        if seq.num_tokens >= self.config.max_model_len:
            raise BadRequest(
                f"This model's maximum context length is {self.config.max_model_len} tokens, "
                f"the request has {seq.num_tokens} before anything is generated."
            )
        needed = blocks_for(seq.num_tokens) if seq.relays else seq.max_blocks(self.config.max_model_len)
        if needed > self.pool.num_blocks:
            raise BadRequest(
                f"The request may grow to {needed} KV blocks, this node has {self.pool.num_blocks}. "
                "Ask for fewer tokens, or give the node more KV memory."
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence whose KV is to be computed here, by priority, then in order of arrival."""
        seq.likely_cached = self.likely_cached(seq)
        insert_by_priority(self.waiting, seq, lambda each: each.request.priority)

    def likely_cached(self, seq: Sequence) -> int:
        """Tokens of a sequence that the prefix cache would spare now."""
        reusable = (seq.num_tokens - 1) // BLOCK_SIZE
        return len(self.pool.match(seq.full_block_hashes()[:reusable])) * BLOCK_SIZE

    def reserve(self, seq: Sequence) -> int | None:
        """Give a sequence the blocks for KV that another node will send.

        Returns how many leading blocks the prefix cache holds already, or None while there is no room, or while another
        one waits whose turn is first.
        """
        busy = bool(self.running or self.reserved)
        if self._free_seats() <= 0 or (self.waiting and _goes_first(self.waiting[0], seq)):
            return None
        if not self._take_blocks(seq, spare_tokens=0, watermark=len(self.running) + 1 if busy else 0):
            return None
        self.reserved[seq.key] = seq
        return seq.num_computed // BLOCK_SIZE

    def join(self, seq: Sequence, first_token: int) -> None:
        """A reserved sequence's KV is complete: run it from its first generated token on."""
        del self.reserved[seq.key]
        seq.num_computed = seq.num_scheduled = seq.num_tokens
        self._publish(seq)
        seq.token_ids.append(first_token)
        self._run(seq, self._lightest_group())

    def abort(self, seq: Sequence) -> None:
        """Forget a sequence; one that is in steps right now, at the end of the last of them.

        Its blocks are freed, but for those of a relaying one. Of a reserved one the caller has made sure
        that nothing writes to them any more.
        """
        if seq in self.waiting:
            self.waiting.remove(seq)
        else:
            self._leave(seq)

    def free(self, seq: Sequence) -> None:
        """Give the blocks of a sequence that no longer runs back to the pool, once no step in flight writes to them."""
        if seq.in_flight:
            seq.given_up = True
            return
        self.pool.release(seq.blocks)
        seq.blocks = []

    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    # ------------------------------------------------------------ steps

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run now."""
        for offset in range(self.config.num_groups):
            group = (self._next_group + offset) % self.config.num_groups
            plan = self._schedule_group(group) if self._in_flight[group] < self.config.depth else None
            if plan is not None:
                self._next_group = group + 1
                return plan
        return None

    def _schedule_group(self, group: int) -> Plan | None:
        self._yielding = None
        rows: list[Row] = [(seq, 1) for seq in self._decoding(group)]
        budget = self.config.max_num_batched_tokens - len(rows)
        if rows:  # which may be all that a step is to have, or more: a prompt must not stand still beside them
            budget = max(1, min(budget, self.config.prefill_chunk))
        for seq in self.running.values():
            if budget > 0 and seq.num_unscheduled > 1 and self._can_run(seq, group):
                rows.append((seq, min(seq.num_unscheduled, budget)))
                budget -= rows[-1][1]
        admitted: list[Sequence] = []
        part = self._part_of_waiting(group) if budget > 0 and self.waiting else 0.0
        while budget > 0 and self.waiting:
            seq = self.waiting[0]
            # Rounds up, so that the lightest group always passes.
            if part < weight_of(seq) / self.config.num_groups or not self._admit(seq, group):
                break
            self.waiting.popleft()
            part -= weight_of(seq)
            admitted.append(seq)
            rows.append((seq, min(seq.num_unscheduled, budget)))
            budget -= rows[-1][1]
        if not rows:
            return None
        self._steps += 1
        step = step_input(self._steps, rows)
        self._in_flight[group] += 1
        for seq, count in rows:
            seq.in_flight += 1
            seq.num_scheduled += count
        for index, spec in enumerate(step.samples):
            seq, _ = rows[spec.seq_index]
            seq.num_pending += 1
            seq.last_draw = (self._steps, index)
        return Plan(step, [seq for seq, _ in rows], admitted, group)

    def update(self, plan: Plan, sampled: list[SampledToken]) -> list[Progress]:
        """Enter what a step computed and drew; a group's steps come in the order of their start. Finished sequences leave.

        One whose token has an error is only reported: it is the caller's to abort.
        """
        self._in_flight[plan.group] -= 1
        drawn = {spec.seq_index: token for spec, token in zip(plan.step.samples, sampled, strict=True)}
        progress = []
        for index, (seq, query_len) in enumerate(zip(plan.seqs, plan.step.query_lens, strict=True)):
            seq.in_flight -= 1
            if seq.over:
                self.num_wasted_rows += query_len
                self._leave(seq)
                continue
            token = drawn.get(index)
            if token is not None and token.error is not None:  # nor is its KV worth keeping
                seq.num_pending -= 1
                progress.append(Progress(seq, token, None))
                continue
            seq.num_computed += query_len
            self._publish(seq)
            reason = None
            if token is not None:
                seq.num_pending -= 1
                seq.token_ids.append(token.token_id)
                reason = seq.finish_reason(self.config.max_model_len)
            if reason is not None or (token is not None and seq.relays):
                self._leave(seq)
            progress.append(Progress(seq, token, reason))
        return progress

    def fail(self, plan: Plan) -> None:
        """A step raised: forget its sequences. The others are untouched."""
        self._in_flight[plan.group] -= 1
        for seq in plan.seqs:
            seq.in_flight -= 1
            self.abort(seq)

    def check_integrity(self) -> None:
        """Assert that every used block is some sequence's; held ones of finished sequences excepted."""
        self.pool.check_integrity()
        for seq in [*self.running.values(), *self.reserved.values()]:
            assert len(seq.blocks) * BLOCK_SIZE >= seq.num_scheduled >= seq.num_computed, (
                f"{seq.key} ran past its blocks"
            )
            assert seq.num_published * BLOCK_SIZE <= seq.num_computed, f"{seq.key} named what is not computed"
        for seq in self.waiting:
            assert not seq.blocks, f"{seq.key} waits and holds blocks"

    # ------------------------------------------------------------ inside

    def _can_run(self, seq: Sequence, group: int) -> bool:
        return (
            seq.group == group
            and not seq.over
            and seq is not self._yielding
            and not seq.ends_in_flight(self.config.max_model_len)
        )

    def _decoding(self, group: int) -> Iterator[Sequence]:
        """Running sequences of `group` that need one row, each with a block for it; preempts where blocks lack."""
        for seq in list(self.running.values()):
            if not seq.blocks or seq.num_unscheduled != 1 or not self._can_run(seq, group):  # no blocks: preempted here
                continue
            if len(seq.blocks) * BLOCK_SIZE < seq.num_expected and not self._grow(seq):
                continue
            yield seq

    def _grow(self, seq: Sequence) -> bool:
        """One more block for `seq`, taken from the youngest others if need be. False if it must wait or go itself.

        One of its own group that is in a step gets no row in the next, and gives its blocks after that; for one of
        another group it would have to wait longer.
        """
        while self.pool.num_idle == 0:
            victim = next(s for s in reversed(self.running.values()) if s.group == seq.group or not s.in_flight)
            if victim.in_flight:
                self._yielding = victim
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        seq.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._remove(seq)
        self.free(seq)
        seq.num_computed = seq.num_scheduled = seq.num_published = 0
        seq.preemptions += 1
        self.num_preemptions += 1
        seq.likely_cached = 0
        self.waiting.appendleft(seq)

    def _free_seats(self) -> int:
        return self.config.max_num_seqs - len(self.running) - len(self.reserved)

    def _admit(self, seq: Sequence, group: int) -> bool:
        if self._free_seats() <= 0 or (self.due is not None and not _goes_first(seq, self.due)):
            return False
        if not self._take_blocks(seq, spare_tokens=1, watermark=len(self.running)):
            return False
        self._run(seq, group)
        return True

    def _run(self, seq: Sequence, group: int) -> None:
        seq.group = group
        self.running[seq.key] = seq

    def _lightest_group(self) -> int:
        held = group_weights(self.running.values(), self.config.num_groups)
        return held.index(min(held))

    def _part_of_waiting(self, group: int) -> float:
        held = group_weights(self.running.values(), self.config.num_groups)
        seats, room = self._free_seats(), self.pool.num_idle - len(self.running)
        return part_of_waiting(group, held, islice(self.waiting, max(0, seats)), room)

    def _take_blocks(self, seq: Sequence, *, spare_tokens: int, watermark: int) -> bool:
        """Blocks for all known tokens, from the prefix cache as far as it reaches.

        `spare_tokens` at the end are computed even if cached (the logits of the last one are needed);
        `watermark` blocks stay free for the growth of those that run.
        """
        reusable = (seq.num_tokens - spare_tokens) // BLOCK_SIZE
        hits = self.pool.match(seq.full_block_hashes()[:reusable])
        missing = blocks_for(seq.num_tokens) - len(hits)
        idle_hits = sum(1 for block in hits if self.pool.is_idle(block))
        if missing + watermark > self.pool.num_idle - idle_hits:
            return False
        self.pool.acquire(hits)
        seq.blocks = hits + self.pool.allocate(missing)
        seq.num_computed = seq.num_scheduled = len(hits) * BLOCK_SIZE
        seq.num_published = len(hits)
        if seq.preemptions == 0:
            seq.cached_tokens = seq.num_computed
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += seq.num_computed
        return True

    def _publish(self, seq: Sequence) -> None:
        """Name the blocks that are now full, for the prefix cache."""
        full = seq.num_computed // BLOCK_SIZE
        if full > seq.num_published:
            hashes = seq.full_block_hashes()
            for index in range(seq.num_published, full):
                self.pool.publish(seq.blocks[index], hashes[index])
            seq.num_published = full

    def _remove(self, seq: Sequence) -> None:
        self.running.pop(seq.key, None)
        self.reserved.pop(seq.key, None)

    def _leave(self, seq: Sequence) -> None:
        if seq.in_flight:
            seq.over = True
            return
        self._remove(seq)
        if not seq.relays or seq.given_up:
            self.free(seq)


def _goes_first(waiting: Sequence, arriving: Sequence) -> bool:
    """Whether one that waits goes before one whose KV comes from elsewhere: it ran already, or is more important, or as
    important and came no later."""
    if waiting.preemptions:
        return True
    return (waiting.request.priority, waiting.arrival_s) <= (arriving.request.priority, arriving.arrival_s)


def insert_by_priority(queue: deque[T], item: T, priority: Callable[[T], int]) -> None:
    """Put `item` behind the last one of its own or a lower number; those before keep their order."""
    at = len(queue)
    while at > 0 and priority(queue[at - 1]) > priority(item):
        at -= 1
    queue.insert(at, item)
