"""The index of a sequence's tokens, against a search through all of them."""

from __future__ import annotations

import random

import pytest

from common.engine.speculation.token_index import MAX_MATCH, Proposal, TokenIndex


def slow_proposal(document: list[int], ids: list[int], limit: int) -> Proposal:
    """What followed the longest earlier occurrence of the end of `ids`, the latest one of those, searched token by token."""
    everything = [-1, *document, -1, *ids] if document else [-1, *ids]
    end, best, found = len(everything), 1, 0
    for place in range(end - 2, 0, -1):
        length = 0
        while (
            length < min(MAX_MATCH, len(everything) - 1)
            and everything[place - length] == everything[end - 1 - length] >= 0
        ):
            length += 1
        if length > best:
            best, found = length, place
    if not found:
        return Proposal([])
    period = everything[found + 1 :]
    proposed = [period[i % len(period)] for i in range(limit)]
    return Proposal(proposed[: proposed.index(-1)] if -1 in proposed else proposed, best)


def edited(draw: random.Random, vocab: int) -> tuple[list[int], list[int]]:
    """A text, and the same with one token in twelve replaced, left out or doubled."""
    text = [draw.randrange(vocab) for _ in range(300)]
    copy: list[int] = []
    for token in text:
        edit = draw.randrange(36)
        copy += [] if edit == 0 else [draw.randrange(vocab)] if edit == 1 else [token, token] if edit == 2 else [token]
    return text, copy


@pytest.mark.parametrize("vocab", [4, 40, 4000])
@pytest.mark.parametrize("is_prediction", [False, True])
def test_acceptance_is_that_of_a_search_through_everything(vocab: int, is_prediction: bool) -> None:
    """Both draft for an answer that repeats a text with changes; a proposal may be another one of the same quality."""
    draw = random.Random(vocab)
    text, answer = edited(draw, vocab)
    document, ids = (text, [1, 2]) if is_prediction else ([], [*text, 1, 2])
    index = TokenIndex([document] if document else (), max_candidates=32)
    ours = theirs = drafts = 0
    for token_number in range(len(answer)):
        assert index.take(ids, 1000)
        expected = answer[token_number : token_number + 8]
        proposals = index.propose((), len(expected)), slow_proposal(document, ids, len(expected))
        right = [
            next(
                (i for i, (a, b) in enumerate(zip(each.token_ids, expected, strict=False)) if a != b),
                len(each.token_ids),
            )
            for each in proposals
        ]
        ours, theirs, drafts = ours + right[0], theirs + right[1], drafts + len(expected)
        ids.append(answer[token_number])
    assert abs(ours - theirs) / drafts < 0.03
    assert vocab == 4 or ours / drafts > 0.4


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    index, ids = TokenIndex(max_candidates=8), [5, 6, 7] * 100
    assert not index.take(ids, 200)
    assert index.take(ids, 200)
    assert index.propose((), 4).token_ids == [5, 6, 7, 5], "a repeated part goes on"


def test_tokens_of_another_document_end_a_match() -> None:
    index = TokenIndex([[1, 2, 3, 4]], max_candidates=8)
    assert index.take([9, 1, 2], 100)
    assert index.propose((), 5) == Proposal([3, 4], 2), "the prediction ends there"
    assert index.propose([3], 5) == Proposal([4], 3), "after a token that must come next"
    assert index.propose((), 0).token_ids == index.propose([8], 3).token_ids == []
