"""Log-probabilities of prompts, computed in slices, against a plain restatement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.control.messages import WHOLE_VOCABULARY
from common.control.whole_vocabulary import most_likely_of
from common.engine.sampling import prompt_logprobs
from common.engine.sampling.prompt_logprobs import score_prompts
from common.engine.step import ScoredRows

VOCAB = 50


def hidden_and_head(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=generator), 3 * torch.randn(8, VOCAB, generator=generator)


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 1000])
def test_every_row_gets_its_tokens_logprob_rank_and_the_most_likely(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "_SLICE_LOGITS", rows_at_a_time * VOCAB)
    hidden, head = hidden_and_head(20)
    sizes: list[int] = []

    def logits_of(part: Tensor) -> Tensor:
        sizes.append(part.size(0))
        return part @ head

    scored = [
        ScoredRows(0, 2, [4, 9, 9, 0, 49], 0),
        ScoredRows(1, 10, [1, 2, 3, 4, 5, 6, 7], 99),
        ScoredRows(2, 0, [8], 2),
        ScoredRows(3, 5, [3, 1], WHOLE_VOCABULARY),
    ]
    found = score_prompts(logits_of, hidden, VOCAB, scored).wait()
    assert max(sizes) <= rows_at_a_time
    expected = (hidden @ head).double().log_softmax(-1)
    for rows, per_row in zip(scored, found, strict=True):
        for offset, (token, ours) in enumerate(zip(rows.token_ids, per_row, strict=True)):
            theirs = expected[rows.row + offset]
            assert ours.logprob == pytest.approx(theirs[token].item(), abs=1e-5)
            assert ours.rank == int((theirs >= theirs[token]).sum())
            ids, values = zip(*most_likely_of(ours), strict=True) if rows.num_top else ((), ())
            count = VOCAB if rows.num_top == WHOLE_VOCABULARY else rows.num_top
            assert [*ids] == theirs.argsort(descending=True, stable=True)[:count].tolist()
            assert values == pytest.approx(theirs[[*ids]].tolist(), abs=1e-5)


def test_equal_logits_are_ranked_by_id_and_all_count_in_the_rank() -> None:
    (((logprob, rank, top_ids, *_),),) = score_prompts(
        lambda part: torch.zeros(part.size(0), 4), torch.zeros(1, 2), 4, [ScoredRows(0, 0, [2], 3)]
    ).wait()
    assert (rank, top_ids) == (4, [0, 1, 2])
    assert logprob == pytest.approx(-1.3862944)


def test_a_rank_that_does_not_sample_takes_part_and_has_nothing() -> None:
    calls: list[int] = []
    found = score_prompts(
        lambda part: calls.append(part.size(0)), torch.zeros(5, 2), VOCAB, [ScoredRows(0, 0, [1, 2, 3], 1)]
    )
    assert found.wait() == [[]]
    assert calls == [3]
