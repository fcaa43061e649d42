"""Decode steps of random sequences, as a scheduler could have made them."""

from __future__ import annotations

import random

from common.control.messages import SamplingParams
from common.engine.step import SampleSpec, StepInput

BLOCK = 16


def random_decode(pool: int, max_pages: int, rng: random.Random, num_seqs: int, vocab: int) -> StepInput:
    """One row each of `num_seqs` sequences of random lengths up to `max_pages` blocks, scattered over `pool` blocks."""
    blocks = rng.sample(range(pool), num_seqs * max_pages)
    tables = [blocks[i * max_pages : (i + 1) * max_pages] for i in range(num_seqs)]
    lens = [rng.randint(1, max_pages * BLOCK) for _ in range(num_seqs)]
    places = [(table, length - 1) for table, length in zip(tables, lens, strict=True)]
    return StepInput(
        step_id=1,
        token_ids=[rng.randrange(vocab) for _ in lens],
        positions=[length - 1 for length in lens],
        slot_mapping=[[table[at // BLOCK] * BLOCK + at % BLOCK for table, at in places]],
        query_lens=[1] * num_seqs,
        context_lens=lens,
        block_tables=[tables],
        num_decode_seqs=num_seqs,
        samples=[
            SampleSpec(i, i, SamplingParams(seed=i, max_tokens=9, temperature=0.7, logprobs=2), length, 0)
            for i, length in enumerate(lens)
        ],
    )
