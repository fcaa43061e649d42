"""Samples of one prompt: they share its full blocks, and each continues in a copy of the last, partial one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_engine import FakeRunner, generate
from support.oracle import TINY, make_tiny
from support.runner_cases import make_runner, prompt

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.runner import ModelRunner
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import KVStorage

GREEDY = SamplingParams(seed=0, max_tokens=30, temperature=0.0)
PROMPT = list(range(100, 141))
WINDOWS = [(None,), (20,), (None, 20), (33, None, 2)]


def sequence(name: str, tokens: list[int], sampling: SamplingParams = GREEDY, root: str = "m") -> Sequence:
    return Sequence(AttemptKey(name, 1), EngineRequest(pack_ids(tokens), sampling), list(tokens), root_hash(root), 0.0)


class Engine:
    """A scheduler and the fake model, which sees every slot that is not what it should be."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), depth: int = 1, blocks: int = 64) -> None:
        pool = BlockPool(blocks * len(windows), len(windows))
        self.scheduler = Scheduler(SchedulerConfig(1000, 16, 64, 64, depth=depth), pool, windows)
        self.runner = FakeRunner(pool.num_blocks, windows)
        self.answers: dict[str, list[int]] = {}

    def start(self) -> ScheduledStep:
        scheduled = self.scheduler.schedule()
        assert scheduled is not None
        return scheduled

    def land(self, scheduled: ScheduledStep) -> None:
        output = self.runner.execute(scheduled.step)
        for done in self.scheduler.update(scheduled, output.sampled, output.prompt_logprobs):
            if done.finish_reason is not None:
                self.answers[done.seq.key.request_id] = done.seq.tokens.ids[done.seq.tokens.prompt_len :]
        self.scheduler.check_integrity()

    def step(self) -> ScheduledStep:
        scheduled = self.start()
        self.land(scheduled)
        return scheduled

    def finish(self) -> None:
        while not self.scheduler.is_idle():
            self.step()
        assert self.scheduler.pool.num_used == 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 41, 48])
@pytest.mark.parametrize("generated", [1, 6])
def test_each_further_sample_computes_one_row(windows: tuple[int | None, ...], length: int, generated: int) -> None:
    engine, tokens = Engine(windows), PROMPT[:length] + list(range(max(0, length - len(PROMPT))))
    engine.scheduler.add(sequence("0", tokens))
    for _ in range(generated):
        engine.step()
    for n in range(1, 8):
        engine.scheduler.add(sequence(str(n), tokens))
    scheduled = engine.step()
    assert scheduled.step.query_lens == [1] * 8
    assert len(scheduled.step.copies) == (7 * len(windows) if (length - 1) % 16 else 0)
    assert [seq.cached_tokens for seq in scheduled.seqs[1:]] == [length - 1] * 7
    engine.finish()
    assert engine.answers == {str(n): generate(tokens, 30) for n in range(8)}


@pytest.mark.parametrize("windows", WINDOWS)
def test_samples_follow_kv_that_arrived(windows: tuple[int | None, ...]) -> None:
    engine, first = Engine(windows), sequence("0", PROMPT)
    wanted = engine.scheduler.reserve(first)
    assert wanted is not None
    engine.scheduler.add(sequence("early", PROMPT[:30]))
    assert engine.step().step.copies == [], "not all of it is there yet"
    for table, blocks in enumerate(first.blocks.tables):
        engine.runner.write(table, blocks, PROMPT, wanted[table] * 16)
    engine.scheduler.join(first, generate(PROMPT, 1)[0])
    engine.scheduler.add(sequence("1", PROMPT))
    assert engine.step().step.query_lens == [1, 1, 1]
    engine.finish()
    assert engine.answers["0"] == engine.answers["1"] == generate(PROMPT, 30)


def test_the_block_that_is_copied_is_not_given_away_before_the_copy() -> None:
    engine = Engine(depth=2, blocks=9)
    first = sequence("0", PROMPT)
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(sequence("1", PROMPT))
    scheduled = engine.start()
    [copy] = scheduled.step.copies
    engine.scheduler.end(first, "aborted")
    other = engine.start()
    assert not engine.scheduler.pool.is_idle(copy.source)
    engine.land(scheduled)
    engine.land(other)
    assert engine.scheduler.pool.is_idle(copy.source)
    engine.finish()
    assert engine.answers == {"1": generate(PROMPT, 30)}


def test_nothing_is_copied_that_is_not_computed_or_not_the_same() -> None:
    engine = Engine()
    engine.scheduler.add(sequence("0", PROMPT))
    engine.scheduler.add(sequence("beside", PROMPT))
    assert engine.step().step.copies == [], "both are computed in the same step"
    for name, tokens, sampling, root in (
        ("another last token but one", [*PROMPT[:-2], 7, 8], GREEDY, "m"),
        ("another block before", [7, *PROMPT[1:]], GREEDY, "m"),
        ("other weights", PROMPT[:9], GREEDY, "adapter"),
        ("longer", [*PROMPT, 1, 2, 3], GREEDY, "m"),
        ("log-probabilities wanted", PROMPT, GREEDY._replace(prompt_logprobs=1), "m"),
    ):
        engine.scheduler.add(sequence(name, tokens, sampling, root))
        assert engine.step().step.copies == [], name
    engine.scheduler.add(sequence("another last token", [*PROMPT[:-1], 7]))
    assert len(engine.step().step.copies) == 1
    engine.finish()
    assert engine.answers["another last token"] == generate([*PROMPT[:-1], 7], 30)
    assert engine.answers["longer"] == generate([*PROMPT, 1, 2, 3], 30)


def test_a_copy_whose_step_failed_is_no_source() -> None:
    engine = Engine()
    engine.scheduler.add(sequence("0", PROMPT, GREEDY._replace(max_tokens=3)))
    engine.step()
    engine.scheduler.add(sequence("1", PROMPT))
    failing = engine.start()
    assert len(failing.step.copies) == 1
    engine.scheduler.fail(failing)
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_used == 0
    engine.scheduler.add(sequence("2", PROMPT))
    assert engine.step().step.copies == []
    engine.finish()
    assert engine.answers == {"2": generate(PROMPT, 30)}


# ---------------------------------------------------------------- with a real model


def answers(runner: ModelRunner, tokens: list[int], seeds: list[int]) -> tuple[list[list[int]], int]:
    """The samples of one prompt in one engine, and how many blocks were copied."""
    windows = runner._storage.layout.spec.windows
    pool = BlockPool(400, len(windows))
    scheduler = Scheduler(SchedulerConfig(512, 16, 64, 16), pool, windows)
    found: dict[int, list[int]] = {}
    copies = 0
    waiting = [
        sequence(str(seed), tokens, SamplingParams(seed=seed, max_tokens=24, temperature=1.0), "f") for seed in seeds
    ]
    scheduler.add(waiting.pop(0))
    while (scheduled := scheduler.schedule()) is not None:
        copies += len(scheduled.step.copies)
        for done in scheduler.update(scheduled, runner.execute(scheduled.step).sampled):
            for seq in waiting if done.tokens else []:
                scheduler.add(seq)
            waiting = [] if done.tokens else waiting
            if done.finish_reason is not None:
                found[done.seq.request.sampling.seed] = done.seq.tokens.ids[done.seq.tokens.prompt_len :]
    return [found[seed] for seed in seeds], copies


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("qwen3", "float32"), ("qwen3", "float8_e4m3"), ("qwen2-window", "float32"), ("gemma3", None)],
)
def test_each_sample_is_as_if_it_were_alone(name: str, kv_dtype: str | None, tmp_path: Path) -> None:
    runner = make_runner(make_tiny(name, tmp_path / name), kv_dtype=kv_dtype, chooses_attention=True)
    seeds = [3, 4, 5, 6]
    for length in (11, 47, 64, 90):
        tokens = prompt(length, TINY[name].vocab_size)
        together, copies = answers(runner, tokens, seeds)
        assert copies == 3 * len(runner._storage.layout.spec.windows)
        assert together == [answers(runner, tokens, [seed])[0][0] for seed in seeds]


# ---------------------------------------------------------------- in memory

_LATENT = LayerGroup((0, 1, 2), (KVPlane("latent", 24), KVPlane("rope", 8)), 1, "bfloat16")
_FULL = LayerGroup((0, 2), (KVPlane("k", 8), KVPlane("v", 8)), 2, "float8_e4m3")
SPECS = {
    "one group": KVSpec.uniform(3, 4, 8, "bfloat16"),
    "planes of two widths": KVSpec((_LATENT,)),
    "two groups of one table": KVSpec((*KVSpec.uniform(3, 4, 8, "float32").groups, _LATENT)),
    "two tables": KVSpec((_FULL, replace(_FULL, layers=(1, 3), window=20, table=1))),
}


@pytest.mark.parametrize("name", SPECS)
def test_blocks_are_copied_in_all_layers_of_their_table(name: str) -> None:
    spec = SPECS[name]
    layout = KVLayout("m", spec)
    for table in range(spec.num_tables):
        storage = KVStorage(layout, layout.shard(0, 0), 6)
        storage.data.copy_(torch.randint(0, 120, storage.data.shape, dtype=torch.uint8))
        before = [{p: t.clone() for p, t in group.planes.items()} for group in storage.groups]
        storage.copy_blocks(table, torch.tensor([1, 4]), torch.tensor([3, 0]))
        for group, was, layer_group in zip(storage.groups, before, spec.groups, strict=True):
            if layer_group.table != table:
                continue
            for plane, now in group.planes.items():
                expected = was[plane].clone()
                expected[:, 3], expected[:, 0] = was[plane][:, 1], was[plane][:, 4]
                assert torch.equal(now.float(), expected.float())
