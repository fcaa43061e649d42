"""Counting the tokens that penalties need, and what of it is sent to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.grammars import EOS, fake_tokenizer

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, Grammar, SamplingParams
from common.engine.grammar.compile import compile_grammar
from common.engine.seen_tokens import TokenCounter, with_token
from common.engine.sequence import Sequence
from common.engine.step import SampleSpec, StepInput
from common.node.ranks.messages import MAX_ORDER_BYTES, RankCodec


def sequence(prompt: list[int], generated: list[int], **params: Any) -> Sequence:
    sampling = SamplingParams(**{"seed": 3, "max_tokens": 500, **params})
    return Sequence(
        AttemptKey("r", 1), EngineRequest(pack_ids(prompt), sampling), prompt + generated, root_hash("f"), 0.0
    )


def test_what_is_sent_to_other_ranks_is_bounded_by_the_distinct_tokens() -> None:
    seq = sequence([5, 6] * 50_000, [7] * 10_000, repetition_penalty=1.1)
    seen = seq.tokens.seen()
    assert seen is not None
    assert len(seen.ids) == len(seen.counts) == 3 * 4
    only_generated = sequence([5, 6] * 50_000, [7] * 10_000, presence_penalty=1.0).tokens.seen()
    assert only_generated is not None
    assert len(only_generated.ids) == 4, "the prompt matters to repetition_penalty only"
    assert MAX_ORDER_BYTES > 256 * 151_936 * 8, "256 sequences that have seen all of a large vocabulary"
    codec = RankCodec()
    step = StepInput(1, [1], [0], [[0]], [1], [1], [[[0]]], 1, [SampleSpec(0, 0, seq.request.sampling, 1, 1, seen)])
    assert codec.decode(codec.encode(step)) == step


def test_counter_takes_a_long_prompt_and_repeated_tokens() -> None:
    counter = TokenCounter(list(range(1000)) * 2, SamplingParams(seed=0, max_tokens=1, repetition_penalty=1.2))
    counter.add([5, 2000, 5])
    counts = dict(
        zip(
            np.frombuffer(counter.seen().ids, np.int32).tolist(),
            np.frombuffer(counter.seen().counts, np.int32).tolist(),
            strict=True,
        )
    )
    assert len(counts) == 1001
    assert (counts[5], counts[2000], counts[6]) == (2, 1, 0)


def test_one_more_token_counts_as_if_the_counter_had_seen_it() -> None:
    counter = TokenCounter([1, 2], SamplingParams(seed=0, max_tokens=1, repetition_penalty=1.2))
    for token_id in (5, 1, 5):
        expected = with_token(counter.seen(), token_id)
        counter.add([token_id])
        assert counter.seen() == expected


def test_draws_of_which_a_grammar_leaves_one_token_do_not_count_tokens() -> None:
    grammar = Grammar('start: "abcabc" /[xy]/')
    seq = sequence([5, 6], [], repetition_penalty=1.1, grammar=grammar)
    seq.tokens.set_grammar(compile_grammar(fake_tokenizer(), grammar.source), [EOS])
    seq.tokens.draft((), limit=10, max_model_len=100)
    assert seq.tokens.draft_ids == [*b"abcabc"]
    assert [seq.tokens.seen(num_drafts) for num_drafts in range(6)] == [None] * 6
    counter = TokenCounter([5, 6], seq.request.sampling)
    counter.add([*b"abcabc"])
    assert seq.tokens.seen(6) == counter.seen()
