"""The scheduler under random arrivals, aborts and memory pressure, checked by a model that sees every wrong slot."""

from __future__ import annotations

from collections import deque

from fake_engine import VOCAB, FakeRunner, generate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.scheduler import Plan, Scheduler, SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.errors import BadRequest
from common.hashing import root_hash
from common.kv.pool import BlockPool
from common.protocol import AttemptKey, SamplingParams

PREFIXES = [list(range(n, n + 48)) for n in (0, 100, 200)]


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences come and go; whatever finishes must have the tokens of an undisturbed run."""

    @initialize(
        num_blocks=st.integers(8, 24),
        budget=st.integers(1, 64),
        seats=st.integers(1, 5),
        chunk=st.integers(1, 32),
        groups=st.integers(1, 3),
    )
    def start(self, num_blocks: int, budget: int, seats: int, chunk: int, groups: int) -> None:
        self.runner = FakeRunner(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=120,
                max_num_seqs=seats,
                max_num_batched_tokens=max(budget, seats),
                prefill_chunk=chunk,
                num_groups=groups,
            ),
            BlockPool(num_blocks),
        )
        self.live: dict[AttemptKey, tuple[Sequence, list[int]]] = {}
        self.flying: deque[tuple[Plan, list[SampledToken]]] = deque()
        self.count = 0

    def _sequence(self, prefix: int, cut: int, tail: list[int], max_tokens: int, *, relays: bool = False) -> Sequence:
        self.count += 1
        tokens = PREFIXES[prefix][:cut] + tail
        return Sequence(
            key=AttemptKey(f"r{self.count}", 1),
            token_ids=tokens,
            prompt_len=len(tokens),
            sampling=SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0),
            root=root_hash("fake"),
            arrival_s=0.0,
            relays=relays,
        )

    @rule(
        prefix=st.integers(0, 2),
        cut=st.integers(1, 48),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        max_tokens=st.integers(1, 40),
    )
    def add(self, prefix: int, cut: int, tail: list[int], max_tokens: int) -> None:
        seq = self._sequence(prefix, cut, tail, max_tokens)
        try:
            self.scheduler.check_fits(seq)
        except BadRequest:
            return
        self.live[seq.key] = (seq, generate(seq.token_ids, max_tokens))
        self.scheduler.add(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live, key=str)))
        seq, _ = self.live.pop(key)
        self.scheduler.abort(seq)

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule()
    def launch(self) -> None:
        """Start a step and leave it in flight, as a pipeline does."""
        plan = self.scheduler.schedule()
        if plan is None:
            return
        step = plan.step
        assert len(step.token_ids) <= self.scheduler.config.max_num_batched_tokens
        assert not {seq.key for seq in plan.seqs} & {seq.key for other, _ in self.flying for seq in other.seqs}
        assert len(plan.seqs) == len({seq.key for seq in plan.seqs})
        self.flying.append((plan, self.runner.execute(step).sampled))
        assert len(self.flying) <= self.scheduler.config.num_groups

    @rule()
    def land(self) -> None:
        self._land()

    def _step(self) -> bool:
        self.launch()
        return self._land()

    def _land(self) -> bool:
        if not self.flying:
            return False
        plan, sampled = self.flying.popleft()
        for done in self.scheduler.update(plan, sampled):
            if done.finish_reason is not None:
                seq, expected = self.live.pop(done.seq.key)
                assert seq.token_ids[seq.prompt_len :] == expected
                assert done.finish_reason == "length"
        return True

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        held = {block for seq in self.scheduler.running.values() for block in seq.blocks}
        assert self.scheduler.pool.num_used == len(held), "a block belongs to nobody"
        assert len(self.scheduler.running) <= self.scheduler.config.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self._step():
                break
        assert not self.live, "a sequence never finished"
        assert self.scheduler.is_idle()
        assert self.scheduler.pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
