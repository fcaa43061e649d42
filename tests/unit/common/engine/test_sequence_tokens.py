"""Masks and bans from a request's parameters, against slow restatements."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.grammars import EOS, fake_tokenizer, json_grammar

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.grammar.compile import compile_grammar
from common.engine.sequence import Sequence
from common.engine.sequence_tokens import both, completed_by, mask_of


def bits(mask: bytes, vocab: int) -> set[int]:
    words = np.frombuffer(mask, np.int32)
    return {i for i in range(min(vocab, 32 * words.size)) if int(words[i // 32]) >> (i % 32) & 1}


@pytest.mark.parametrize("ids", [[0], [31], [32], [5, 5, 63, 64, 1000], list(range(100))], ids=str)
def test_a_mask_has_the_bits_of_its_tokens(ids: list[int]) -> None:
    assert bits(mask_of(ids), 2000) == set(ids)


def test_two_masks_allow_what_both_allow() -> None:
    ours, theirs = mask_of([1, 40, 99]), mask_of([1, 7, 40])
    assert bits(both(ours, theirs) or b"", 200) == {1, 40}
    assert both(None, ours) == both(ours, None) == ours
    assert both(None, None) is None


def sequence(prompt: list[int], generated: list[int], **params: object) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=99)._replace(**params)
    return Sequence(
        AttemptKey("r", 1), EngineRequest(pack_ids(prompt), sampling), prompt + generated, root_hash("m"), 0.0
    )


def test_a_word_is_completed_only_by_generated_tokens_and_drafts() -> None:
    seq = sequence([1, 2], [3, 1, 2], bad_words=[[9], [2, 8], [3, 1, 2, 7], [1, 2, 3, 1, 2, 6], [2, 3, 5]])
    assert seq.tokens.banned() == [9, 8, 7], "the prompt's end completes nothing"
    seq.tokens.draft_ids = [3, 4]
    assert seq.tokens.banned(1) == [9, 5]
    assert seq.tokens.banned(2) == [9]
    assert sequence([1], [2]).tokens.banned() == []


def test_end_tokens_are_banned_until_the_grammar_begins() -> None:
    grammar = json_grammar(after=(40,))
    seq = sequence([1, 2], [], bad_words=[[9]], grammar=grammar)
    seq.tokens.set_grammar(compile_grammar(fake_tokenizer(), grammar.source), [EOS])
    assert seq.tokens.banned() == [EOS, 9]
    seq.tokens.ids.append(40)
    seq.tokens.advance_grammar()
    assert seq.tokens.banned() == [9]


def test_banned_tokens_are_those_of_the_whole_history() -> None:
    draw = random.Random(4)
    for _ in range(300):
        words = [[draw.randrange(3) for _ in range(draw.randrange(1, 5))] for _ in range(draw.randrange(1, 6))]
        generated = [draw.randrange(3) for _ in range(draw.randrange(6))]
        seq = sequence([draw.randrange(3) for _ in range(4)], generated, bad_words=words)
        seq.tokens.draft_ids = [draw.randrange(3) for _ in range(3)]
        for count in range(4):
            text = generated + seq.tokens.draft_ids[:count]
            want = [
                word[-1] for word in words if [*([None] * 9), *text][-len(word) + 1 :] == word[:-1] or len(word) == 1
            ]
            assert seq.tokens.banned(count) == want == completed_by(words, text)


def test_ranks_get_masks_and_bans_instead_of_the_lists() -> None:
    seq = sequence([1], [2], allowed_token_ids=[4, 5], bad_words=[[4], [1, 2]], min_tokens=3)
    assert bits(seq.tokens.mask or b"", 99) == {4, 5}
    assert seq.tokens.draw_params == seq.request.sampling._replace(allowed_token_ids=pack_ids(), bad_words=[])
    assert seq.tokens.needs_known
    assert not sequence([1], [2], bad_words=[[4]]).tokens.needs_known
    plain = sequence([1], [2])
    assert plain.tokens.draw_params is plain.request.sampling
    assert plain.tokens.mask is None
