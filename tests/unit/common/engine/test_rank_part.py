"""What one rank computes of a step: the sequences whose blocks a data-parallel rank holds, in its own numbers; and the rows of a
context-parallel rank, which together draw what one rank draws."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from support.lora_files import load_adapters, write_adapter
from support.oracle import make_tiny
from support.rank_processes import Case, run_ranks
from support.recording import Recorder
from support.runner_cases import drive, make_runner, prompt

from common.control.messages import SamplingParams
from common.engine.rank_part import FEWEST_ROWS, lens_between, own_part, row_bounds
from common.engine.step import SampleSpec, StepInput
from common.kv.stripes import Stripe

GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
STEP = StepInput(
    step_id=3,
    token_ids=[10, 20, 30, 31, 32, 40],
    positions=[17, 5, 0, 1, 2, 33],
    slot_mapping=[[3 * 16 + 1, 4 * 16 + 5, 80, 81, 82, 6 * 16 + 1]],
    query_lens=[1, 1, 3, 1],
    context_lens=[18, 6, 3, 34],
    block_tables=[[[1, 3], [4], [5], [0, 2, 6]]],
    num_decode_seqs=2,
    samples=[SampleSpec(i, row, GREEDY, 1, 0) for i, row in enumerate((0, 1, 4, 5))],
    placeholder_step=2,
    placeholders=[(1, 7), (5, 8)],
)


def step_of(query_lens: list[int], num_decode_seqs: int = 0) -> StepInput:
    rows = sum(query_lens)
    return StepInput(1, [1] * rows, list(range(rows)), [[0] * rows], query_lens, query_lens, [[]], num_decode_seqs)


@pytest.mark.parametrize(("rows", "ranks"), [(64, 2), (65, 2), (500, 3), (64 * FEWEST_ROWS, 64)])
def test_every_row_is_one_ranks_and_shares_differ_by_one_at_most(rows: int, ranks: int) -> None:
    bounds = row_bounds(step_of([1, rows - 1], 1), ranks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, rows, ranks + 1)
    counts = {hi - lo for lo, hi in pairwise(bounds)}
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("query_lens", "num_decode_seqs", "ranks"),
    [([500], 0, 1), ([2 * FEWEST_ROWS - 1], 0, 2), ([1] * 500, 500, 2), ([5] * 100, 100, 2)],
    ids=["one rank", "few rows", "decode rows", "rows of drafts"],
)
def test_every_rank_computes_all_rows(query_lens: list[int], num_decode_seqs: int, ranks: int) -> None:
    assert row_bounds(step_of(query_lens, num_decode_seqs), ranks) == ()


def test_the_rows_of_sequences_are_cut_where_shares_end() -> None:
    assert lens_between([1, 10, 5], 0, 16) == [1, 10, 5]
    assert lens_between([1, 10, 5], 0, 1) == [1, 0, 0]
    assert lens_between([1, 10, 5], 4, 12) == [0, 7, 1]
    assert lens_between([1, 10, 5], 12, 12) == [0, 0, 0]


LAYOUTS = [(2, 1, [3]), (2, 2, [2, 1]), (3, 1, [3])]
"""(cp, tp, layers of each stage)"""


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("phi3", "gpt2", "gemma3"))]
)
def test_every_layout_draws_what_one_rank_draws_with_and_without_adapters(name: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model")
    adapters = [str(write_adapter(tmp_path / f"a{n}", model, rank=3 * n, seed=n)) for n in (1, 2)]
    runner = make_runner(model)
    load_adapters(runner._model, adapters)
    recorder = Recorder(runner, (1, 2, 0))
    drive(recorder, [prompt(n, 250) for n in (1, 150, 33, 99)], 90, 8)
    shared = [step for step in recorder.steps if row_bounds(step, 3)]
    assert any(step.samples for step in shared)
    assert any(step.num_decode_seqs for step in shared)
    recording = tmp_path / "recording"
    recorder.write(recording)
    arguments = {"model": str(model), "recording": str(recording), "same_host": True, "adapters": adapters}
    cases = [Case(tp, len(pp), {**arguments, "pp_layers": pp}, cp=cp) for cp, tp, pp in LAYOUTS]
    expected = [token for output in recorder.outputs for token in output.sampled]
    scored = [[each[:-1] for each in found] for output in recorder.outputs for found in output.prompt_logprobs]
    for (cp, tp, _), outcomes in zip(LAYOUTS, run_ranks("support.rank_jobs:replay", cases), strict=True):
        assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == []
        last = outcomes[-cp * tp].value
        assert last["tokens"] == [token.token_id for token in expected]
        assert len(last["prompt_logprobs"]) == len(scored)
        assert max(outcome.value["kv_error"] for outcome in outcomes) < 1e-4


def test_each_sequence_is_on_the_rank_of_its_blocks() -> None:
    even, odd = (own_part(STEP, Stripe(rank, 2), 16) for rank in range(2))
    assert (even.rows, odd.rows) == ([1, 5], [0, 2, 3, 4])
    assert even.step.token_ids == [20, 40]
    assert even.step.slot_mapping == [[2 * 16 + 5, 3 * 16 + 1]]
    assert even.step.block_tables == [[[2], [0, 1, 3]]]
    assert even.step.placeholders == [(0, 7), (1, 8)]
    assert (even.step.num_decode_seqs, odd.step.num_decode_seqs) == (1, 1)
    assert odd.step.query_lens == [1, 3]
    assert odd.step.context_lens == [18, 3]
    assert odd.step.block_tables == [[[0, 1], [2]]]
    assert odd.step.placeholders == []


def test_a_rank_without_sequences_has_no_rows() -> None:
    part = own_part(STEP, Stripe(7, 8), 16)
    assert (part.rows, part.step.token_ids, part.step.query_lens, part.step.block_tables) == ([], [], [], [[]])
