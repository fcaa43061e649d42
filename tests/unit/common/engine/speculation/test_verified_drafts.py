"""A real model verifies drafts of which many are wrong: tokens and log-probabilities are those of plain decoding."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support import runner_cases
from support.noisy_drafts import NoisyDrafts
from support.oracle import make_tiny
from support.tiny_engine import NUM_BLOCKS, VOCAB, answers, make_runner

from common.base.errors import EngineError
from common.engine.draft_model import DraftModel
from common.engine.drafting import Drafting
from common.engine.sequence import Sequence
from common.engine.step import StepInput, StepOutput
from common.kernels.native.find import find_native


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_of_plain_decoding(family: str, depth: int, tmp_path: Path) -> None:
    """Every kind of sampling that looks back, with preemption; the second model has sliding windows."""
    path = make_tiny(family, tmp_path / "model")
    plain, _ = answers(path, 1)
    drafting = Drafting(NoisyDrafts(3, 4, VOCAB, lambda seq: [t.token_id for t in plain[seq.key]]), 5, always=True)
    drafted, scheduler = answers(path, depth, drafting=drafting)
    assert scheduler.num_preemptions > 0
    counts = drafting.counts["noisy"]
    assert counts.accepted > 100
    assert counts.drafted > counts.accepted + 50
    for key, tokens in plain.items():
        assert [t.token_id for t in drafted[key]] == [t.token_id for t in tokens], key
        for ours, theirs in zip(drafted[key], tokens, strict=True):
            if theirs.logprobs is not None:
                assert ours.logprobs is not None
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)


@pytest.mark.skipif(find_native() is None, reason="no native kernels")
def test_log_probabilities_by_native_kernels_are_equal_bit_for_bit(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "model")
    plain, _ = answers(path, 1, runner=runner_cases.make_runner(path, chooses_attention=True))

    def answer(seq: Sequence) -> list[int]:
        return [token.token_id for token in plain[seq.key]]

    runner = runner_cases.make_runner(path, chooses_attention=True)
    assert runner._native_step is not None
    drafting = Drafting(NoisyDrafts(5, 4, VOCAB, answer), 5, always=True)
    drafted, _ = answers(path, 1, runner=runner, drafting=drafting)
    assert drafted == plain
    assert any(token.logprobs for tokens in plain.values() for token in tokens)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_drafts_for_itself_is_always_right(family: str, depth: int, tmp_path: Path) -> None:
    """With the same keys and rules it draws what the target draws, beside preemption; the second model has sliding windows."""
    path = make_tiny(family, tmp_path / "model")
    plain, _ = answers(path, 1)
    model = DraftModel(
        make_runner(path, overlaps=False, one_table=True), NUM_BLOCKS, max_model_len=128, prompt_chunk=16
    )
    drafted, scheduler = answers(path, depth, drafting=Drafting(model, 5, always=True))
    assert scheduler.num_preemptions > 0 or family == "gemma2"
    counts = scheduler.drafting.counts["draft"]
    assert counts.accepted == counts.drafted > 100
    model.blocks.check_integrity()
    for key, tokens in plain.items():
        assert [t.token_id for t in drafted[key]] == [t.token_id for t in tokens], key


def test_steps_go_on_without_drafts_where_the_draft_model_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("qwen3", tmp_path / "model")
    plain, _ = answers(path, 1)
    runner = make_runner(path, overlaps=False)
    model = DraftModel(runner, NUM_BLOCKS, max_model_len=128, prompt_chunk=16)
    fails, execute = itertools.cycle([True, False, False]), runner.execute

    def execute_or_fail(step: StepInput) -> StepOutput:
        if next(fails):
            raise EngineError("a test")
        return execute(step)

    monkeypatch.setattr(runner, "execute", execute_or_fail)
    drafted, scheduler = answers(path, 1, drafting=Drafting(model, 5, always=True))
    model.blocks.check_integrity()
    assert scheduler.drafting.counts["draft"].accepted > 10
    assert {key: [t.token_id for t in tokens] for key, tokens in drafted.items()} == {
        key: [t.token_id for t in tokens] for key, tokens in plain.items()
    }
