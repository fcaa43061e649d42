"""English sentences of many lengths, for pooling models. The same for a seed."""

from __future__ import annotations

import random

_WHO = ("A nurse", "The old fisherman", "My neighbour", "Nobody in the village", "A team of engineers", "The committee")
_DOES = ("repairs", "describes", "forgets", "paints", "sells", "measures", "photographs", "compares", "refuses")
_WHAT = ("a broken clock", "the harbour", "two violins", "an invoice of 300 euros", "the storage engine", "wild herbs")
_WHEN = ("before sunrise", "while it rains", "once a year", "after the second trial", "in spite of the noise")
_MORE = ("and nobody knows why", "because the price went up", "so that others can learn from it", "but only on paper")


def sentences(count: int, *, longest: int = 4, seed: int = 7) -> list[str]:
    """`count` texts of 1 to `longest` sentences."""
    rng = random.Random(seed)

    def sentence() -> str:
        parts = [rng.choice(_WHO), rng.choice(_DOES), rng.choice(_WHAT)]
        parts += [rng.choice(each) for each in (_WHEN, _MORE) if rng.random() < 0.5]
        return " ".join(parts) + "."

    return [" ".join(sentence() for _ in range(rng.randint(1, longest))) for _ in range(count)]
