"""The scheduler under random arrivals, aborts, relays, failed steps and memory pressure, checked by a model that sees every wrong
slot. Any change of a sequence's state that the table does not have raises.

With one step in flight, with several groups, and with the next step prepared while one runs; with one block table and with
several, with and without sliding windows: whatever finishes must have the tokens and the reason of an undisturbed run. Steps
compute as soon as they start or as late as they may.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_engine import VOCAB, FakeRunner, generate, wasted_rows

from common.base.errors import BadRequest
from common.base.hashing import BLOCK_SIZE, BlockHash, hash_blocks, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.kv_allocator import first_seen
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.sequence_state import END_IGNORED, SequenceState
from common.engine.step import SampledToken
from common.kv.pool import BlockPool

PREFIXES = [list(range(n, n + 48)) for n in (0, 100, 200)]


WITHOUT_BLOCKS = {SequenceState.ACCEPTED, SequenceState.WAITING, SequenceState.ENDED}
IN_CONTAINERS = {
    SequenceState.ACCEPTED: lambda _: [False, False, False],
    SequenceState.WAITING: lambda _: [True, False, False],
    SequenceState.RESERVED: lambda _: [False, True, False],
    SequenceState.RUNNING: lambda _: [False, False, True],
    SequenceState.YIELDING: lambda _: [False, False, True],
    SequenceState.HELD: lambda seq: [False, False, seq.progress.in_flight > 0],
    SequenceState.ENDING: lambda _: [False, False, True],
    SequenceState.ENDED: lambda _: [False, False, False],
}
"""Whether a sequence in each state waits, is reserved, runs."""


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences come and go; whatever finishes must have the tokens of an undisturbed run."""

    @initialize(
        num_blocks=st.integers(8, 24),
        budget=st.integers(1, 64),
        slots=st.integers(1, 5),
        chunk=st.integers(1, 32),
        layout=st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 2)]),
        late=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (2,), (20,), (33,), (None, 20), (33, None, 2), (20, 48)]),
        ranks=st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        slots: int,
        chunk: int,
        layout: tuple[int, int],
        late: bool,
        windows: tuple[int | None, ...],
        ranks: tuple[int, int],
    ) -> None:
        """`ranks`: context-parallel and data-parallel ones."""
        groups, depth = layout
        stripes, homes = ranks
        self.late = late
        self.windows = windows
        self.promised: set[BlockHash] = set()
        """The hashes that the journal has reported, as a router's index holds them."""
        self.wanted: dict[AttemptKey, list[int]] = {}
        """Of sequences whose KV is to arrive, the first block of each table that was asked for."""
        num_blocks = num_blocks // stripes * stripes * homes * len(windows)
        self.runner = FakeRunner(num_blocks, windows)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=120,
                max_num_seqs=slots,
                max_num_batched_tokens=max(budget, slots),
                prefill_chunk=chunk,
                num_microbatches=groups,
                depth=depth,
            ),
            BlockPool(num_blocks, len(windows), stripes, homes),
            windows,
        )
        self.made: list[Sequence] = []
        self.live: dict[AttemptKey, tuple[Sequence, list[int]]] = {}
        self.held: list[Sequence] = []
        """Relayed or given up; a transfer may still read their blocks."""
        self.arriving: list[Sequence] = []
        self.flying: deque[tuple[ScheduledStep, list[SampledToken] | None]] = deque()
        self.count = 0
        self.stopped = 0
        self.wasted_rows = 0
        self.aborted_rows = 0

    def _sequence(
        self,
        tokens: list[int],
        max_tokens: int,
        stops: list[int],
        min_tokens: int,
        relays: bool,
        priority: int,
        tenant: str,
    ) -> Sequence:
        self.count += 1
        sampling = SamplingParams(
            seed=1, max_tokens=max_tokens, temperature=0.0, stop_token_ids=stops, min_tokens=min_tokens
        )
        seq = Sequence(
            key=AttemptKey(f"r{self.count}", 1),
            request=EngineRequest(pack_ids(tokens), sampling, priority=priority, tenant=tenant),
            token_ids=list(tokens),
            root=root_hash("fake"),
            arrival_s=float(self.count)
            if self.count % 2
            else 0.0,  # of KV from elsewhere: some is due before those that wait
            relays=relays,
        )
        self.made.append(seq)
        return seq

    @rule(
        prefix=st.integers(0, 2),
        cut=st.integers(1, 48),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        max_tokens=st.integers(1, 40),
        stop_every=st.sampled_from([0, 0, 4, 20]),
        min_tokens=st.integers(0, 20),
        kind=st.sampled_from(["local", "local", "relays", "arrives"]),
        priority=st.sampled_from([0, 0, 5]),
        tenant=st.sampled_from(["", "", "", "other", "third"]),
    )
    def add(
        self,
        prefix: int,
        cut: int,
        tail: list[int],
        max_tokens: int,
        stop_every: int,
        min_tokens: int,
        kind: str,
        priority: int,
        tenant: str,
    ) -> None:
        tokens = PREFIXES[prefix][:cut] + tail
        stops = list(range(0, VOCAB, stop_every)) if stop_every else []
        seq = self._sequence(tokens, max_tokens, stops, min(min_tokens, max_tokens), kind == "relays", priority, tenant)
        try:
            self.scheduler.check_fits(seq)
        except BadRequest:
            return
        expected = generate(tokens, max_tokens, stops, min(min_tokens, max_tokens))
        if kind != "arrives":
            self.live[seq.key] = (seq, expected[:1] if kind == "relays" else expected)
            self.scheduler.add(seq)
        elif len(expected) > 1 and (wanted := self.scheduler.reserve(seq)) is not None:
            self.live[seq.key] = (seq, expected)
            self.wanted[seq.key] = wanted
            self.arriving.append(seq)

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A transfer fills the blocks of a reserved sequence, which then joins."""
        seq = self.arriving.pop(data.draw(st.integers(0, len(self.arriving) - 1)))
        for table, (blocks, first) in enumerate(zip(seq.blocks.tables, self.wanted[seq.key], strict=True)):
            self.runner.write(table, blocks, seq.tokens.ids, first * BLOCK_SIZE)
        self.scheduler.join(seq, self.live[seq.key][1][0])

    @precondition(lambda self: self.held)
    @rule()
    def source_released(self) -> None:
        self.scheduler.free(self.held.pop())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live, key=str)))
        seq, _ = self.live.pop(key)
        if seq in self.arriving:
            self.arriving.remove(seq)
        self._lose(seq)
        self.scheduler.end(seq, "aborted")
        self._ended(seq)

    def _lose(self, seq: Sequence) -> None:
        self.aborted_rows += seq.progress.num_scheduled - seq.progress.num_computed

    def _ended(self, seq: Sequence) -> None:
        assert seq.state in END_IGNORED
        if seq.state is SequenceState.HELD:
            self.held.append(seq)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        """The owner of a sequence that has ended may hear of it later, or of something else."""
        over = [seq for seq in self.made if seq.state in END_IGNORED]
        if over:
            self.scheduler.end(data.draw(st.sampled_from(over)), "again")

    @precondition(lambda self: self.flying)
    @rule()
    def step_fails(self) -> None:
        scheduled, sampled = self.flying.popleft()
        if sampled is None:
            self.runner.execute(scheduled.step)  # later steps may name its tokens
        ending = [self.live.pop(seq.key)[0] for seq in scheduled.seqs if seq.state not in END_IGNORED]
        for seq in ending:
            self._lose(seq)
        self.scheduler.fail(scheduled)
        for seq in ending:
            self._ended(seq)

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule()
    def launch(self) -> None:
        """Start a step and leave it in flight, as a pipeline does."""
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return
        step, pool = scheduled.step, self.scheduler.pool
        ranks = pool.num_stripes * pool.num_homes
        for seq in scheduled.seqs:
            for blocks, first in zip(seq.blocks.tables, seq.blocks.first, strict=True):
                held = list(enumerate(blocks))[first:]
                assert all(block % ranks == pool.part_of(i, seq.blocks.home) for i, block in held), "other rank"
        assert len(step.token_ids) <= self.scheduler.config.max_num_batched_tokens
        if self.scheduler.config.depth == 1:
            assert not {seq.key for seq in scheduled.seqs} & {seq.key for other, _ in self.flying for seq in other.seqs}
            assert not step.placeholders
        assert len(scheduled.seqs) == len({seq.key for seq in scheduled.seqs})
        self.flying.append((scheduled, None if self.late else self.runner.execute(step).sampled))
        assert len(self.flying) <= self.scheduler.config.num_microbatches * self.scheduler.config.depth

    @rule()
    def land(self) -> None:
        self._land()

    def _step(self) -> bool:
        self.launch()
        return self._land()

    def _land(self) -> bool:
        if not self.flying:
            return False
        scheduled, sampled = self.flying.popleft()
        if sampled is None:
            sampled = self.runner.execute(scheduled.step).sampled
        self.wasted_rows += wasted_rows(scheduled)
        for done in self.scheduler.update(scheduled, sampled):
            if done.finish_reason is None and not (done.tokens and done.seq.relays):
                continue
            seq, expected = self.live.pop(done.seq.key)
            assert seq.tokens.ids[seq.tokens.prompt_len :] == expected
            stopped = expected[-1] in seq.request.sampling.stop_token_ids
            self.stopped += stopped and not seq.relays
            if not seq.relays:
                assert done.finish_reason == ("stop" if stopped else "length")
            self._ended(seq)
        return True

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        for seq in self.made:
            containers = self.scheduler.waiting, self.scheduler.reserved.values(), self.scheduler.running.values()
            assert [seq in each for each in containers] == IN_CONTAINERS[seq.state](seq), f"{seq.key} is {seq.state}"
            assert bool(seq.blocks.tables) == (seq.state not in WITHOUT_BLOCKS), f"{seq.key} is {seq.state}"
        owners = [*self.scheduler.running.values(), *self.scheduler.reserved.values(), *self.held]
        owners += [seq for scheduled, _ in self.flying for seq in scheduled.seqs]
        tables = [(seq, table) for seq in owners for table in range(len(seq.blocks.tables))]
        self.scheduler.shares.check_integrity({seq for seq in owners if seq.blocks.tables})
        held = {block for seq, table in tables for block in seq.blocks.tables[table][seq.blocks.first[table] :]}
        held |= {copy.source for scheduled, _ in self.flying for copy in scheduled.step.copies}
        assert self.scheduler.pool.num_used == len(held), "nobody's block"
        for scheduled, _ in self.flying:
            for index, (query_len, end) in enumerate(
                zip(scheduled.step.query_lens, scheduled.step.context_lens, strict=True)
            ):
                for each, window in zip(scheduled.step.block_tables, self.windows, strict=True):
                    seen = each[index][first_seen(end - query_len, window) :]
                    assert not any(map(self.scheduler.pool.is_idle, seen)), "a step uses a free block"
        assert len(self.scheduler.running) <= self.scheduler.config.max_num_seqs
        assert self.wasted_rows <= self.stopped + self.aborted_rows, "more than a row each"

    @invariant()
    def promises(self) -> None:
        """A complete prefix in the journal is one from which a sequence can continue."""
        if not hasattr(self, "scheduler"):
            return
        stored, removed = self.scheduler.pool.journal.take()
        self.promised = self.promised - removed | stored
        for tokens in PREFIXES:
            hashes = hash_blocks(root_hash("fake"), tokens)
            run = list(takewhile(self.promised.__contains__, hashes))
            assert self.scheduler.allocator.hit_blocks(run) == len(run)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for seq in self.arriving:
            del self.live[seq.key]
            self.scheduler.end(seq, "aborted")
        for _ in range(20_000):
            while self.held:
                self.scheduler.free(self.held.pop())
            if not self._step():
                break
        assert not self.live, "a sequence never finished"
        assert self.scheduler.is_idle()
        assert self.scheduler.pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
