"""How likely drafts are right: measured for a node and for each of its sequences. Engine thread; pure."""

from __future__ import annotations

_CLASSES = 6
_FIRST_GUESS = 0.6
_NODE_WEIGHT, _NODE_TRIALS = 4.0, 512.0
_SEQ_TRIALS = 32.0


def class_of(match: int) -> int:
    """Drafts are counted apart by the length of their match: up to 1, 2-3, 4-7, 8-15, from 16 on."""
    return min(match, 16).bit_length()


class Acceptance:
    """Shares of drafts that were accepted after all drafts before them were. Older ones count less and less."""

    def __init__(self, parent: Acceptance | None = None) -> None:
        """`parent`: gives the first guesses, and learns what this one learns."""
        self._parent = parent
        self._accepted = [0.0] * _CLASSES
        self._trials = [0.0] * _CLASSES
        self._most = _NODE_TRIALS if parent is None else _SEQ_TRIALS

    def chance(self, match: int) -> float:
        """The probability that a draft after a match of this length is accepted."""
        kind = class_of(match)
        prior = _FIRST_GUESS if self._parent is None else self._parent.chance(match)
        return (self._accepted[kind] + _NODE_WEIGHT * prior) / (self._trials[kind] + _NODE_WEIGHT)

    def learn(self, match: int, drafted: int, accepted: int) -> None:
        """Count the drafts of one step. The first `accepted` ones were right, and those after the first wrong one were not tried."""
        for number in range(min(drafted, accepted + 1)):
            self._count(class_of(match + number), number < accepted)

    def _count(self, kind: int, accepted: bool) -> None:
        self._accepted[kind] += accepted
        self._trials[kind] += 1
        if self._trials[kind] > self._most:
            self._accepted[kind] /= 2
            self._trials[kind] /= 2
        if self._parent is not None:
            self._parent._count(kind, accepted)
