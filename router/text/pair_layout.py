"""Where a model expects special tokens around a pair of texts. Pure; router process, any thread.

The tokenizers library joins whole encodings only, and a cut one keeps what was cut off: to join a long text with each of
many others, cut to fit, it would have to be encoded again each time.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

SAMPLE = "a 1 . é 中"
"""Every tokenizer has a token for some of it."""


class PairIds(NamedTuple):
    """A tokenized pair of texts; `second_at`: as in `PoolInput`."""

    token_ids: list[int]
    second_at: int


class PairLayout:
    """The layout of a tokenizer's pairs, read from the pairs of texts of no token and one token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises: ValueError if a text is left out of pairs; what the library raises where it cannot join texts."""

        def joined(first: int, second: int) -> Encoding:
            pair = tokenizer.encode_batch_fast([SAMPLE, SAMPLE], add_special_tokens=False)
            for encoding, count in zip(pair, (first, second), strict=True):
                encoding.truncate(count)
            return tokenizer.post_process(pair[0], pair[1])

        empty = joined(0, 0)
        self._special, self._special_types = empty.ids, empty.type_ids
        self._at: list[int] = []
        """Special tokens before the first and before the second text."""
        self._types: list[int] = []
        """Types of the texts' tokens."""
        for sample in (joined(1, 0), joined(0, 1)):
            if 0 not in sample.special_tokens_mask:
                raise ValueError("its post-processor leaves a text out of pairs")
            at = sample.special_tokens_mask.index(0)
            self._at.append(at)
            self._types.append(sample.type_ids[at])

    @property
    def num_special(self) -> int:
        """Special tokens of a pair."""
        return len(self._special)

    def join(self, first: list[int], second: list[int]) -> PairIds:
        """The pair of two tokenized texts with its special tokens."""
        ids, types, texts = list(self._special), list(self._special_types), (first, second)
        # From the back, so that places stay valid; of two texts at one place, the first one comes before.
        for which in sorted((0, 1), key=lambda which: (self._at[which], which), reverse=True):
            at = self._at[which]
            ids[at:at] = texts[which]
            types[at:at] = [self._types[which]] * len(texts[which])
        return PairIds(ids, types.index(1) if 1 in types else 0)
