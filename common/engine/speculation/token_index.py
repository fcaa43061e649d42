"""Finds what followed the latest tokens of a sequence where they occurred before. Engine thread; pure.

All pairs of neighbouring tokens are in a dictionary, each with the place where it occurred last; places of equal pairs are
chained, as in LZ77 compressors. Taking a token in costs one look-up, and a proposal a walk along one chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

MAX_MATCH = 32
"""Longer matches are not measured further."""
_BEFORE_ANY = -1
"""Stands before each document. No token has this id, so that a match ends there."""


class Proposal(NamedTuple):
    """Tokens that may come next."""

    token_ids: list[int]
    match: int = 0
    """Latest tokens that also stand before these ones where they were found; the more, the likelier they are right."""


NOTHING = Proposal([])


class TokenIndex:
    """The tokens of one sequence, after those of other documents; or documents alone."""

    def __init__(self, documents: Iterable[Seq[int]] = (), *, max_candidates: int) -> None:
        """`max_candidates`: places that a proposal compares, latest first: the longest match is taken, among equal ones the
        latest."""
        self._max_candidates = max_candidates
        self._ids = [_BEFORE_ANY]
        self._previous = [-1]
        """For each place, where the same pair of tokens ended before; -1: nowhere."""
        self._latest: dict[tuple[int, int], int] = {}
        for document in documents:
            self.add(document)
        self._start = len(self._ids)
        self._source = 0
        """Where the sequence now ends in the source of the latest proposal, if that proposal was right."""

    def __len__(self) -> int:
        """Tokens, and one before each document."""
        return len(self._ids)

    def add(self, document: Seq[int]) -> None:
        """Take in a document, in an index without a sequence."""
        self._append(document)
        self._append([_BEFORE_ANY])

    def take(self, ids: list[int], limit: int) -> bool:
        """Take in what is new of a sequence's tokens, at most `limit` of them. Returns whether nothing is left."""
        known = len(self._ids) - self._start
        new = ids[known : known + limit]
        self._append(new)
        self._source += len(new)
        return known + len(new) == len(ids)

    def _append(self, token_ids: Seq[int]) -> None:
        ids, previous, latest = self._ids, self._previous, self._latest
        before = ids[-1]
        for place, token_id in enumerate(token_ids, len(ids)):
            pair = before, token_id
            previous.append(latest.get(pair, -1))
            latest[pair] = place
            before = token_id
        ids.extend(token_ids)

    def propose(self, after: Seq[int], limit: int) -> Proposal:
        """At most `limit` tokens to follow the sequence and the tokens `after` it."""
        ids = self._ids
        tail = [*ids[-MAX_MATCH - 1 :], *after] if after else ids[-MAX_MATCH - 1 :]
        if limit <= 0 or len(ids) - self._start + len(after) < 2:
            return NOTHING
        end, best = len(ids) - 1, 0
        place = self._latest.get((tail[-2], tail[-1]), -1) if after else self._previous[end]
        if 0 < self._source < end and not after:
            best = self._match(self._source, tail)
        found, best = (self._source, best) if best >= 2 else (0, 1)
        found, best = self._longest(place, tail, found, best)
        if not found:
            return NOTHING
        self._source = found
        proposed = self._following(found, limit)
        while len(proposed) < limit and not after:  # the match overlaps the end: its period goes on
            proposed += proposed[: limit - len(proposed)]
        return Proposal(_within_document(proposed), best)

    def find(self, tail: Seq[int], limit: int, above: int) -> Proposal:
        """At most `limit` tokens that follow the last ones of `tail` (at most `MAX_MATCH`) in the documents, where more than
        `above` of these match; else nothing."""
        if limit <= 0 or len(tail) <= max(above, 1):
            return NOTHING
        place = self._latest.get((tail[-2], tail[-1]), -1)
        found, best = self._longest(place, [_BEFORE_ANY, *tail[-MAX_MATCH:]], 0, max(above, 1))
        return Proposal(_within_document(self._following(found, limit)), best) if found else NOTHING

    def _longest(self, place: int, tail: list[int], found: int, best: int) -> tuple[int, int]:
        """The place of the longest match of `tail`, and its length, from `place` on to earlier ones; `found` and `best` if none
        is longer than `best`."""
        ids = self._ids
        for _ in range(self._max_candidates):
            if place < 0 or best >= MAX_MATCH:
                break
            if place >= best and ids[place - best] == tail[-1 - best] and (length := self._match(place, tail)) > best:
                best, found = length, place
            place = self._previous[place]
        return found, best

    def _following(self, place: int, limit: int) -> list[int]:
        return self._ids[place + 1 : place + 1 + limit]

    def _match(self, place: int, tail: list[int]) -> int:
        """How many tokens up to `place` equal the last ones of `tail`."""
        ids, length = self._ids, 0
        size = min(MAX_MATCH, len(tail) - 1)
        while length < size and ids[place - length] == tail[-1 - length]:
            length += 1
        return length


def _within_document(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(_BEFORE_ANY)] if _BEFORE_ANY in token_ids else token_ids
