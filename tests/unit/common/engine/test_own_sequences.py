"""What a data-parallel rank computes of a step: the sequences whose blocks it holds, in its own numbers."""

from __future__ import annotations

from common.control.messages import SamplingParams
from common.engine.own_sequences import own_part
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
