"""Which sequences run in the next step, on which blocks. Pure: no I/O, no clock, no torch.

Continuous batching under a token budget: running sequences first (one token each), then chunks of
prompts that were begun, then new ones while blocks, seats and budget last. A sequence gets the blocks
of all its known tokens when it is admitted, and one more at a time while it generates; when none is
left the youngest running sequence is preempted: it gives its blocks back and is recomputed later.

`schedule` and `update` are apart so that several steps can be in flight, as many as a pipeline has stages.
Each is over another *group* of the running sequences. A sequence joins the lightest group, by sequences and their blocks;
of many that wait each group takes its part at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TypeVar

from common.engine.sequence import Sequence
from common.engine.step import RelayProgress, SampledToken, SampleSpec, StepInput
from common.errors import BadRequest
from common.hashing import BLOCK_SIZE
from common.kv.layout import blocks_for
from common.kv.pool import BlockPool
from common.protocol import AttemptKey, FinishReason

_ROW_BLOCKS = 32
"""A row costs about as much in the linear layers as attention over so many blocks (a 0.5B model: 67 on one core)."""

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
    """Steps in flight at once; every one of them needs a group of its own."""


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
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._steps = 0
        self._busy_groups: set[int] = set()
        self._next_group = 0

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
        insert_by_priority(self.waiting, seq, lambda each: each.priority)

    def likely_cached(self, seq: Sequence) -> int:
        """Tokens of a sequence that the prefix cache would spare now."""
        reusable = (seq.num_tokens - 1) // BLOCK_SIZE
        return len(self.pool.match(seq.full_block_hashes()[:reusable])) * BLOCK_SIZE

    def reserve(self, seq: Sequence) -> int | None:
        """Give a sequence the blocks for KV that another node will send.

        Returns how many leading blocks the prefix cache holds already, or None while there is no room.
        """
        busy = bool(self.running or self.reserved)
        if self._free_seats() <= 0 or (busy and self.waiting):
            return None
        if not self._take_blocks(seq, spare_tokens=0, watermark=len(self.running) + 1 if busy else 0):
            return None
        self.reserved[seq.key] = seq
        return seq.num_computed // BLOCK_SIZE

    def join(self, seq: Sequence, first_token: int) -> None:
        """A reserved sequence's KV is complete: run it from its first generated token on."""
        del self.reserved[seq.key]
        seq.num_computed = seq.num_tokens
        self._publish(seq)
        seq.token_ids.append(first_token)
        self._run(seq, self._lightest_group())

    def abort(self, seq: Sequence) -> None:
        """Forget a sequence; one that is in a step right now, at the end of that step.

        Its blocks are freed, but for those of a relaying one. Of a reserved one the caller has made sure
        that nothing writes to them any more.
        """
        if seq.in_flight:
            seq.aborted = True
        elif seq in self.waiting:
            self.waiting.remove(seq)
        else:
            self._leave(seq)

    def free(self, seq: Sequence) -> None:
        """Give the blocks of a sequence that no longer runs back to the pool."""
        self.pool.release(seq.blocks)
        seq.blocks = []

    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    # ------------------------------------------------------------ steps

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run now."""
        for offset in range(self.config.num_groups):
            group = (self._next_group + offset) % self.config.num_groups
            plan = None if group in self._busy_groups else self._schedule_group(group)
            if plan is not None:
                self._next_group = group + 1
                return plan
        return None

    def _schedule_group(self, group: int) -> Plan | None:
        rows: list[tuple[Sequence, int]] = [(seq, 1) for seq in self._decoding(group)]
        budget = self.config.max_num_batched_tokens - len(rows)
        if rows:
            budget = min(budget, self.config.prefill_chunk)
        for seq in self.running.values():
            if budget > 0 and seq.group == group and seq.num_uncomputed > 1:
                rows.append((seq, min(seq.num_uncomputed, budget)))
                budget -= rows[-1][1]
        admitted: list[Sequence] = []
        part = self._part_of_waiting(group) if budget > 0 and self.waiting else 0.0
        while budget > 0 and self.waiting:
            seq = self.waiting[0]
            # Rounds up, so that the lightest group always passes.
            if part < _weight(seq) / self.config.num_groups or not self._admit(seq, group):
                break
            self.waiting.popleft()
            part -= _weight(seq)
            admitted.append(seq)
            rows.append((seq, min(seq.num_uncomputed, budget)))
            budget -= rows[-1][1]
        if not rows:
            return None
        for seq, _ in rows:
            seq.in_flight = True
        self._busy_groups.add(group)
        self._steps += 1
        return Plan(_step_input(self._steps, rows), [seq for seq, _ in rows], admitted, group)

    def update(self, plan: Plan, sampled: list[SampledToken]) -> list[Progress]:
        """Enter what a step computed and drew. Finished sequences leave."""
        self._busy_groups.discard(plan.group)
        drawn = {spec.seq_index: token for spec, token in zip(plan.step.samples, sampled, strict=True)}
        progress = []
        for index, (seq, query_len) in enumerate(zip(plan.seqs, plan.step.query_lens, strict=True)):
            seq.in_flight = False
            if seq.aborted:
                self.abort(seq)
                continue
            seq.num_computed += query_len
            self._publish(seq)
            token = drawn.get(index)
            reason = None
            if token is not None:
                seq.token_ids.append(token.token_id)
                reason = seq.finish_reason(self.config.max_model_len)
            if reason is not None or (token is not None and seq.relays):
                self._leave(seq)
            progress.append(Progress(seq, token, reason))
        return progress

    def fail(self, plan: Plan) -> None:
        """A step raised: forget its sequences. The others are untouched."""
        self._busy_groups.discard(plan.group)
        for seq in plan.seqs:
            seq.in_flight = False
            self.abort(seq)

    def check_integrity(self) -> None:
        """Assert that every used block is some sequence's; held ones of finished sequences excepted."""
        self.pool.check_integrity()
        for seq in [*self.running.values(), *self.reserved.values()]:
            assert len(seq.blocks) * BLOCK_SIZE >= seq.num_computed, f"{seq.key} computed past its blocks"
        for seq in self.waiting:
            assert not seq.blocks, f"{seq.key} waits and holds blocks"

    # ------------------------------------------------------------ inside

    def _decoding(self, group: int) -> Iterator[Sequence]:
        """Running sequences of `group` that need one row, each with a block for it; preempts where blocks lack."""
        for seq in list(self.running.values()):
            if seq.group != group or seq.num_uncomputed != 1 or seq.key not in self.running:
                continue
            if len(seq.blocks) * BLOCK_SIZE < seq.num_tokens and not self._grow(seq):
                continue
            yield seq

    def _grow(self, seq: Sequence) -> bool:
        """One more block for `seq`, taken from the youngest others if need be. False if `seq` itself had to go."""
        while self.pool.num_idle == 0:
            victim = next((s for s in reversed(self.running.values()) if not s.in_flight), None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        seq.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._remove(seq)
        self.free(seq)
        seq.num_computed = seq.num_published = 0
        seq.preemptions += 1
        self.num_preemptions += 1
        seq.likely_cached = 0
        self.waiting.appendleft(seq)

    def _free_seats(self) -> int:
        return self.config.max_num_seqs - len(self.running) - len(self.reserved)

    def _admit(self, seq: Sequence, group: int) -> bool:
        if self._free_seats() <= 0 or not self._take_blocks(seq, spare_tokens=1, watermark=len(self.running)):
            return False
        self._run(seq, group)
        return True

    def _run(self, seq: Sequence, group: int) -> None:
        seq.group = group
        self.running[seq.key] = seq

    def _lightest_group(self) -> int:
        held = self._group_weights()
        return held.index(min(held))

    def _group_weights(self) -> list[int]:
        held = [0] * self.config.num_groups
        for seq in self.running.values():
            held[seq.group] += _weight(seq)
        return held

    def _part_of_waiting(self, group: int) -> float:
        """The weight that `group` gets if what can be admitted now goes to the lightest groups until they are even."""
        if self.config.num_groups == 1:
            return inf
        held = self._group_weights()
        incoming, room = 0, self.pool.num_idle - len(self.running)
        for seq in islice(self.waiting, max(0, self._free_seats())):
            room -= blocks_for(seq.num_tokens) + 1  # each keeps a block free for its growth
            if incoming and room < 0:
                break
            incoming += _weight(seq)
        lightest = sorted(held)
        for count in range(len(held), 0, -1):
            level = -(-(sum(lightest[:count]) + incoming) // count)
            if level >= lightest[count - 1]:
                return level - held[group]
        raise AssertionError("the lightest group alone takes everything")

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
        seq.num_computed = len(hits) * BLOCK_SIZE
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
        self._remove(seq)
        if not seq.relays:
            self.free(seq)


def _weight(seq: Sequence) -> int:
    """What a sequence costs in a step of its group, in blocks of attention."""
    return _ROW_BLOCKS + blocks_for(seq.num_tokens)


def insert_by_priority(queue: deque[T], item: T, priority: Callable[[T], int]) -> None:
    """Put `item` behind the last one of its own or a lower number; those before keep their order."""
    at = len(queue)
    while at > 0 and priority(queue[at - 1]) > priority(item):
        at -= 1
    queue.insert(at, item)


def _step_input(step_id: int, rows: list[tuple[Sequence, int]]) -> StepInput:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[SampleSpec] = []
    for index, (seq, count) in enumerate(rows):
        start, stop = seq.num_computed, seq.num_computed + count
        token_ids += seq.token_ids[start:stop]
        positions += range(start, stop)
        slots += [seq.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]
        if stop == seq.num_tokens:
            samples.append(SampleSpec(index, seq.sampling, stop, seq.num_generated, seq.seen_tokens()))
    return StepInput(
        step_id=step_id,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_lens=[count for _, count in rows],
        context_lens=[seq.num_computed + count for seq, count in rows],
        block_tables=[list(seq.blocks) for seq, _ in rows],
        samples=samples,
        relay=[
            RelayProgress(seq.key, _final_blocks(seq, seq.num_computed + count)) for seq, count in rows if seq.relays
        ],
    )


def _final_blocks(seq: Sequence, computed: int) -> int:
    """Blocks whose KV no later step of the prompt will touch, once `computed` tokens are done."""
    return len(seq.blocks) if computed == seq.num_tokens else computed // BLOCK_SIZE
