"""Decides which sequences run in the next step, and on which blocks. Pure: no I/O, no clock, no torch.

Continuous batching under a token budget: decoding sequences first, then prompts by priority and by their tenant's share, equal
ones: begun before new ones, while blocks, sequence slots and budget last. A sequence gets the blocks of its known tokens when it
is admitted, and more while it generates (`common.engine.kv_allocator`); when none is left a running sequence is preempted, the
youngest of the lowest priority: it gives its blocks back and is recomputed later. So is one of a tenant that has more than its
share while a sequence of another tenant waits (`common.engine.shares`). When a sequence has ended, and why, says
`SequenceTokens.finish_reason`.

`schedule` and `update` are apart so that several steps can be in flight. The stages of a pipeline each work on another
micro-batch of the running sequences (`common.engine.microbatches`). With depth 2 a micro-batch's next step is
scheduled while its last one runs (asynchronous scheduling): a row's token may be one that is just being drawn, unknown
here and known to the ranks (`StepInput.placeholders`). A sequence that turns out to have ended wastes that row. It keeps
its blocks until the row is done, as does a sequence that is aborted or preempted; the prefix cache gets only blocks whose
tokens are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from common.base.errors import BadRequest
from common.base.hashing import BLOCK_SIZE
from common.control.messages import AttemptKey, PromptLogprobs
from common.engine.build_step import Rows, build_step, record_rows
from common.engine.drafting import Drafting
from common.engine.kv_allocator import KVAllocator
from common.engine.microbatches import microbatch_weights, part_of_waiting, weight_of
from common.engine.preemption import Yielding, may_give_way, victim_of_growth
from common.engine.scheduled_step import ScheduledStep, SequenceOutput, take_output
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.sequence_state import END_IGNORED, SequenceState
from common.engine.step import BlockCopy, SampledToken
from common.engine.waiting_queue import WaitingQueue, goes_first
from common.kv.pool import BlockPool
from common.kv.rank_layout import blocks_for

# Read for every sequence of every step: from an enum's class it takes longer.
_WAITING, _RESERVED, _RUNNING = SequenceState.WAITING, SequenceState.RESERVED, SequenceState.RUNNING
_YIELDING, _HELD, _ENDING = SequenceState.YIELDING, SequenceState.HELD, SequenceState.ENDING
Windows = Seq[int | None]


class Scheduler:
    """Holds the sequences that wait, that run, and that have blocks reserved for KV still to arrive (`reserve`)."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, windows: Windows = (None,), drafting: Drafting | None = None
    ) -> None:
        """`windows`: the sliding window of each block table of the pool, None for a table without one. `drafting`: by default only
        what grammars force."""
        self.config = config
        self.drafting = drafting or Drafting()
        self.pool = pool
        self.allocator = KVAllocator(pool, windows, config.max_num_seqs)
        self.shares = self.allocator.shares
        self.waiting = WaitingQueue()
        self.running: dict[AttemptKey, Sequence] = {}
        """By priority, then oldest first; the last is preempted first. With those that have ended and are in a step in flight."""
        self.reserved: dict[AttemptKey, Sequence] = {}
        self.next_reserved: Sequence | None = None
        """The sequence to `reserve` next, if it had to wait; later ones must not take its blocks or its sequence slot."""
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0
        self._copies: list[BlockCopy] = []
        """For the sequences that were admitted to the step being scheduled."""
        self._steps = 0
        self._in_flight = [0] * config.num_microbatches
        self._next_microbatch = 0
        self._yielding = Yielding(config.num_microbatches)

    # ------------------------------------------------------------ sequences in and out

    def check_fits(self, seq: Sequence) -> None:
        """Refuse a sequence that could never run here, before it waits.

        Raises: BadRequest naming the sizes.
        """
        self.config.check_length(seq.num_tokens)
        needed = blocks_for(seq.num_tokens) if seq.relays else seq.max_blocks(self.config.max_model_len)
        if needed > self.allocator.longest:
            tables = self.pool.num_tables
            raise BadRequest(
                f"The request may grow to {needed * tables} KV blocks, this node has {self.allocator.longest * tables}. "
                "Ask for fewer tokens, or give the node more KV memory."
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence whose KV is to be computed here, by priority, then by arrival."""
        seq.likely_cached = self.allocator.hit_blocks(seq.usable_hashes(spare_tokens=1)) * BLOCK_SIZE
        seq.enter(_WAITING, "queued")
        self.waiting.add(seq)

    def reserve(self, seq: Sequence) -> list[int] | None:
        """Give a sequence the blocks for KV that another node will send.

        Returns the first block of each table that is to be sent (`KVAllocator.take_for_arrival`), or None while there is
        no room or while a waiting sequence goes first.
        """
        busy, waiting = bool(self.running or self.reserved), self.waiting.next(self.shares)
        if self._free_slots() <= 0 or (waiting is not None and goes_first(waiting, seq, self.shares)):
            return None
        hashes = seq.usable_hashes(spare_tokens=0)
        first = self.allocator.take_for_arrival(seq, hashes, spare_blocks=len(self.running) + 1 if busy else 0)
        if first is None:
            return None
        held = min(missing - start for missing, start in zip(first, seq.blocks.first, strict=True))
        self._count_hits(seq, held * BLOCK_SIZE)
        seq.enter(_RESERVED, "blocks for its KV")
        self.reserved[seq.key] = seq
        return first

    def join(self, seq: Sequence, first_token: int) -> None:
        """Run a reserved sequence, whose KV is complete now, from its first generated token on."""
        del self.reserved[seq.key]
        seq.progress.num_computed = seq.progress.num_scheduled = seq.num_tokens
        self.allocator.advance(seq)
        seq.tokens.ids.append(first_token)
        weights = microbatch_weights(self.running.values(), self.config.num_microbatches)
        self._run(seq, weights.index(min(weights)), "its KV is complete")

    def end(self, seq: Sequence, reason: str) -> None:
        """End a sequence, whatever its state; nothing happens in those of `END_IGNORED`.

        Its blocks are freed after the last of its steps in flight. If it relays and ran, its owner also has to `free` it. For a
        reserved sequence the caller has made sure that nothing writes to its blocks any more.
        """
        if seq.state in END_IGNORED:
            return
        self.drafting.ended(seq)
        if seq.state is _WAITING:
            self.waiting.remove(seq)
        elif seq.state is _RESERVED:
            del self.reserved[seq.key]
        elif seq.state in (_RUNNING, _YIELDING):
            if seq.relays or seq.progress.in_flight:
                seq.enter(_HELD if seq.relays else _ENDING, reason)
                self._leave(seq)
                return
            del self.running[seq.key]
        self._release(seq, reason)

    def free(self, seq: Sequence) -> None:
        """Return the blocks of a held sequence to the pool: its transfer has released them. Waits for its steps in flight."""
        if seq.progress.in_flight:
            seq.enter(_ENDING, "released by its transfer")
        else:
            self._release(seq, "released by its transfer")

    def _leave(self, seq: Sequence) -> None:
        """Take an ended sequence out of the running ones, unless it is in a step in flight."""
        if not seq.progress.in_flight:
            del self.running[seq.key]
            if seq.state is _ENDING:
                self._release(seq, "its last step is over")

    def _release(self, seq: Sequence, reason: str) -> None:
        self.allocator.free(seq)
        seq.enter(SequenceState.ENDED, reason)

    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    # ------------------------------------------------------------ steps

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can run now."""
        count = self.config.num_microbatches
        for offset in range(2 * count - 1):  # twice: one that yielded may run if the one it yielded to cannot
            microbatch = (self._next_microbatch + offset) % count
            is_full = self._in_flight[microbatch] >= self.config.depth
            scheduled = None if is_full else self._schedule_microbatch(microbatch)
            if scheduled is not None:
                self._next_microbatch = microbatch + 1
                return scheduled
        return None

    def _schedule_microbatch(self, microbatch: int) -> ScheduledStep | None:
        self._yielding.end(microbatch)
        self._share_out(microbatch)
        decodes: list[Rows] = [(seq, 1 + len(seq.tokens.draft_ids)) for seq in self._decoding(microbatch)]
        prompts: list[Rows] = []
        admitted: list[Sequence] = []
        budget = self.config.max_num_batched_tokens - sum([count for _, count in decodes])
        if decodes:  # they may use up the budget, but a prompt must still advance
            budget = max(1, min(budget, self.config.prefill_chunk))
        begun = [seq for seq in self.running.values() if seq.num_unscheduled > 1 and self._can_run(seq, microbatch)]
        # Behind others they get a block each: their KV transfers would time out without any progress.
        relaying = [seq for seq in begun if seq.relays][: budget // (2 * BLOCK_SIZE)]
        budget -= BLOCK_SIZE * len(relaying)
        for seq, is_new in self._next_prompts(begun, microbatch):
            if is_new:
                admitted.append(seq)
            elif seq in relaying:
                relaying.remove(seq)
                budget += BLOCK_SIZE
            count = min(seq.num_unscheduled, budget)
            (decodes if seq.is_decoding else prompts).append((seq, count))
            budget -= count
            if budget <= 0:
                break
        prompts += [(seq, min(seq.num_unscheduled, BLOCK_SIZE)) for seq in relaying]
        if not (decodes or prompts):
            return None
        for part in (decodes, prompts):  # neighbours with the same adapter share its products
            part.sort(key=lambda row: row[0].adapter_id)
        rows = decodes + prompts
        self._steps += 1
        step = build_step(self._steps, rows, len(decodes), self._copies)
        self._copies = []
        self._in_flight[microbatch] += 1
        record_rows(step, rows)
        return ScheduledStep(step, [seq for seq, _ in rows], admitted, microbatch)

    def update(
        self, scheduled: ScheduledStep, sampled: list[SampledToken], scored: Iterable[list[PromptLogprobs]] = ()
    ) -> list[SequenceOutput]:
        """Record what a step computed and drew (`StepOutput`). A micro-batch's steps must come in the order of their start.

        A finished sequence ends, and tokens drawn after its end are dropped.
        """
        self._step_over(scheduled)
        drawn: list[list[SampledToken]] = [[] for _ in scheduled.seqs]
        for spec, token in zip(scheduled.step.samples, sampled, strict=True):
            drawn[spec.seq_index].append(token)
        prompts = {rows.seq_index: found for rows, found in zip(scheduled.step.scored, scored, strict=True)}
        outputs: list[SequenceOutput] = []
        for index, (seq, tokens) in enumerate(zip(scheduled.seqs, drawn, strict=True)):
            seq.progress.in_flight -= 1
            if seq.state in END_IGNORED:
                self._leave(seq)
            else:
                output = take_output(seq, tokens, prompts.get(index, []), self.config.max_model_len)
                self.drafting.verified(seq, output.drafted, output.accepted)
                self._advance(output, scheduled.step.context_lens[index])
                outputs.append(output)
        return outputs

    def _step_over(self, scheduled: ScheduledStep) -> None:
        self._in_flight[scheduled.microbatch] -= 1
        self.pool.release([copy.source for copy in scheduled.step.copies])

    def _advance(self, output: SequenceOutput, context_len: int) -> None:
        """After a step a sequence has KV of `context_len` tokens, but not of the last one drawn: a wrong draft had its place."""
        seq = output.seq
        if output.error is not None:
            return  # the KV must not be cached either
        seq.progress.num_computed = min(context_len, len(seq.tokens.ids) - (len(output.tokens) > 0))
        self.allocator.advance(seq)
        if output.finish_reason is not None or (output.tokens and seq.relays):
            self.end(seq, output.finish_reason or "first token")

    def fail(self, scheduled: ScheduledStep) -> None:
        """End the sequences of a step that raised. The others are untouched."""
        self._step_over(scheduled)
        for seq in scheduled.seqs:
            seq.progress.in_flight -= 1
            if seq.state in END_IGNORED:
                self._leave(seq)
            else:
                self.end(seq, f"step {scheduled.step.step_id} failed")

    def check_integrity(self) -> None:
        """Assert that all sequences are in the right containers and hold what they need. Tests call this."""
        self.pool.check_integrity()
        for seq in self.running.values():
            ended = seq.state in (_HELD, _ENDING)
            assert ended or seq.state in (_RUNNING, _YIELDING), f"{seq.key} runs and is {seq.state}"
            assert seq.progress.in_flight or not ended, f"{seq.key} has ended, is in no step, and runs"
            assert seq.state is not _YIELDING or seq in self._yielding, f"{seq.key} yields to no micro-batch"
            self.allocator.check_integrity(seq, next_row=seq.progress.num_computed)
        for seq in self.reserved.values():
            assert seq.state is _RESERVED, f"{seq.key} is reserved and is {seq.state}"
            self.allocator.check_integrity(seq, next_row=seq.num_tokens)
        for seq in self.waiting:
            assert seq.state is _WAITING, f"{seq.key} waits and is {seq.state}"
            assert not seq.blocks.tables, f"{seq.key} waits and holds blocks"

    def _can_run(self, seq: Sequence, microbatch: int) -> bool:
        tokens = seq.tokens
        return (
            seq.state is _RUNNING
            and seq.microbatch == microbatch
            and not (
                seq.progress.num_pending
                and (tokens.draft_ids or tokens.needs_known or seq.ends_in_flight(self.config.max_model_len))
            )
        )

    def _decoding(self, microbatch: int) -> Iterator[Sequence]:
        """Running sequences of `microbatch` that decode, with blocks for their rows; preempts others if there are not enough."""
        ready = [seq for seq in self.running.values() if seq.is_decoding and self._can_run(seq, microbatch)]
        for seq in self.drafting.draft(ready, len(self.running), self.config):
            if self._can_run(seq, microbatch) and self._has_blocks(seq):
                yield seq
            else:  # perhaps it gave its blocks to one before it
                seq.tokens.draft_ids = []

    def _has_blocks(self, seq: Sequence) -> bool:
        """Grow a sequence for its next rows. Its drafts take no other sequence's blocks."""
        tokens = seq.tokens
        if tokens.draft_ids:
            spare = seq.blocks.num_slots + self.allocator.room_of(seq) * BLOCK_SIZE - seq.num_tokens
            del tokens.draft_ids[max(0, spare) :]
        needed = seq.num_tokens + seq.progress.num_pending + len(tokens.draft_ids)
        return seq.blocks.num_slots >= needed or self._grow(seq, needed)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens`, those of `victim_of_growth` if necessary. False if it must wait or is preempted."""
        while seq.blocks.num_slots < num_tokens:
            while self.allocator.room_of(seq) == 0:
                victim = victim_of_growth(seq, self.running)
                if not self._preempt(victim, seq.microbatch, "preempted") or victim is seq:
                    return False
            self.allocator.grow(seq)
        return True

    def _share_out(self, microbatch: int) -> None:
        """Make room for the sequence whose turn it is, at the cost of tenants that have more than their share."""
        seq, shares = self.waiting.next(self.shares), self.shares
        if self.next_reserved is not None and (seq is None or not goes_first(seq, self.next_reserved, shares)):
            seq = self.next_reserved
        home: int | None = None
        while seq is not None and shares.has_others(seq.request.tenant):
            if self._free_slots() > 0 and self.allocator.fits(seq, spare_blocks=len(self.running) + 1):
                return
            victim = shares.victim(seq, may_give_way(self.running, microbatch, home))
            if victim is None or not self._preempt(victim, microbatch, "preempted: its tenant has more than its share"):
                return
            home = victim.blocks.home  # blocks of other data-parallel ranks would not help

    def _preempt(self, seq: Sequence, microbatch: int, reason: str) -> bool:
        """Preempt a running sequence for one of `microbatch`. False if it is in flight: then it yields."""
        if seq.progress.in_flight:
            self._yielding.begin(seq, microbatch)
            return False
        del self.running[seq.key]
        self.allocator.free(seq)
        seq.enter(_WAITING, reason)
        seq.progress.num_computed = seq.progress.num_scheduled = seq.blocks.num_published = 0
        seq.preemptions += 1
        self.num_preemptions += 1
        seq.likely_cached = 0
        seq.tokens.draft_ids = []
        self.waiting.add_preempted(seq)
        return True

    def _free_slots(self) -> int:
        return self.config.max_num_seqs - len(self.running) - len(self.reserved)

    def _next_prompts(self, begun: Seq[Sequence], microbatch: int) -> Iterator[tuple[Sequence, bool]]:
        """The `begun` and the waiting sequences by turn; equal ones: begun first. With whether each was admitted just now."""
        for each in sorted(begun, key=self.shares.turn):
            yield from ((seq, True) for seq in self._admit_waiting(microbatch, before=each))
            yield each, False
        yield from ((seq, True) for seq in self._admit_waiting(microbatch))

    def _admit_waiting(self, microbatch: int, *, before: Sequence | None = None) -> Iterator[Sequence]:
        """Admit waiting sequences, one after the other; with `before`, only those whose turn is earlier than that one's."""
        part: float | None = None
        while (seq := self.waiting.next(self.shares)) is not None:
            if before is not None and self.shares.turn(seq) >= self.shares.turn(before):
                return
            if part is None:
                slots, room = max(0, self._free_slots()), self.allocator.room - len(self.running)
                weights = microbatch_weights(self.running.values(), self.config.num_microbatches)
                part = part_of_waiting(microbatch, weights, islice(self.waiting, slots), room)
            # Rounds up, so that the lightest micro-batch always passes.
            if part < weight_of(seq) / self.config.num_microbatches or not self._admit(seq, microbatch):
                return
            self.waiting.remove(seq)
            part -= weight_of(seq)
            yield seq

    def _admit(self, seq: Sequence, microbatch: int) -> bool:
        if self._free_slots() <= 0 or (self.next_reserved and not goes_first(seq, self.next_reserved, self.shares)):
            return False
        hashes = seq.usable_hashes(spare_tokens=1)
        if not self.allocator.take(seq, hashes, spare_blocks=len(self.running)):
            return False
        self._copies += self.allocator.copy_begun_block(seq, self.running.values(), seq.num_usable(spare_tokens=1))
        self._count_hits(seq, seq.progress.num_scheduled)
        self._run(seq, microbatch, "admitted")
        return True

    def _run(self, seq: Sequence, microbatch: int, reason: str) -> None:
        seq.enter(_RUNNING, reason)
        seq.microbatch = microbatch
        last = next(reversed(self.running.values()), seq)
        self.running[seq.key] = seq
        if seq.request.priority < last.request.priority:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].request.priority))

    def _count_hits(self, seq: Sequence, num_tokens: int) -> None:
        if seq.preemptions == 0:
            seq.cached_tokens = num_tokens
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += num_tokens
