"""Where a long text may be cut so that its pieces have the tokens of the whole. Pure; router process, any thread.

The tokenizers library takes 150 to 300 bytes of memory for each byte of a text, so long texts are encoded in pieces. A cut is
exact at a single space or line break between other characters if no token of the vocabulary reaches across one there, and
behind a special token. Both depend on the tokenizer: what its vocabulary does not exclude is tried on sample texts, and a
tokenizer that fails takes no pieces. One text of such a tokenizer is encoded whole, however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import AddedToken

from common.base.errors import BadRequest

PIECE_CHARS = 32_768
"""A piece has at least this many characters, except the last one, and more only as far as there is no place for a cut."""
MAX_PIECE_CHARS = 262_144
_SPACE_INSIDE = re.compile(r"[^ĠĊĉč▁\s][Ġ▁ ]")
_BREAK_INSIDE = re.compile(r"[Ċ\n][^ĠĊĉč▁\s]")
_SAMPLES = (
    "A word, 'quoted'; it's 12 345.67 (now) -- don't ! ! ? a_b c-d x=1; /* e */ Ünïcödé straße ΣΑΣ ϊ ",
    'one  two   three\n four\n\nfive\tsix\r\nseven\n\n\n eight\n- nine\n1. ten\n{\n "k": [1, 22, 333]\n}\nend.\nA\nb\n.\n,',
    "日本語 テスト。\n中文 句子、和标点\n한국어 문장 ไทย हिन्दी العربية 🎉 👩‍🚀 e\u0301 f\ufb01 \u00a0 \u3000x\ny",
)

Encode = Callable[[str], list[int]]
Rule = Callable[[str, int, int], "int | None"]
"""The first cut of a text between two positions."""


class TextCuts:
    """The cuts of one tokenizer."""

    def __init__(
        self, vocab: Iterable[str], added: Sequence[AddedToken], encode: Encode, encode_within: Encode
    ) -> None:
        """`encode`: token ids of a text without special tokens around it; `encode_within`: of a text that stands in another."""
        self._encode, self._encode_within = encode, encode_within
        self._strips = any(token.lstrip or token.rstrip for token in added)
        """Whether special tokens take the spaces beside them with them."""
        self._marks = _marks(added)
        crossing_space = crossing_break = False
        for token in vocab:
            crossing_space = crossing_space or _SPACE_INSIDE.search(token) is not None
            crossing_break = crossing_break or _BREAK_INSIDE.search(token) is not None
        rules: list[Rule] = [] if crossing_space else [self._at_space]
        rules += [] if crossing_break else [self._behind_break]
        rules += [self._behind_mark] if self._marks else []
        shown = "".join(f"a{token}{token} b{token}\nc\n{token}" for token in added[:8])
        self._rules: list[Rule] = [
            rule for rule in rules if all(self._is_exact(rule, each + shown + each) for each in _SAMPLES)
        ]

    @property
    def _is_bounded(self) -> bool:
        """Whether ordinary texts can be cut, so that no piece need be longer than `MAX_PIECE_CHARS`."""
        return self._at_space in self._rules

    def pieces(self, text: str) -> Iterator[str]:
        """The text in order, cut where this tokenizer allows it. Raises: BadRequest if a piece would be too long."""
        start = 0
        while len(text) - start > PIECE_CHARS and self._rules:
            end = self._next(text, start + PIECE_CHARS, start + MAX_PIECE_CHARS if self._is_bounded else len(text))
            if end is None:
                break
            yield text[start:end]
            start = end
        if self._is_bounded and len(text) - start > MAX_PIECE_CHARS:
            raise BadRequest(
                f"a text may have at most {MAX_PIECE_CHARS} characters in a row without a single space or line break, because "
                "of the memory that tokenizing takes"
            )
        yield text[start:] if start else text

    def _next(self, text: str, begin: int, end: int) -> int | None:
        """The first cut from `begin` to `end`, of those that the first possible rule finds within a window."""
        while begin < min(end, len(text)):
            for rule in self._rules:
                if (at := rule(text, begin, begin + PIECE_CHARS)) is not None:
                    return at
            begin += PIECE_CHARS
        return None

    def _is_exact(self, rule: Rule, sample: str) -> bool:
        cuts, at = [0], rule(sample, 1, len(sample))
        while at is not None:
            cuts.append(at)
            at = rule(sample, at + 1, len(sample))
        parts = [sample[start:end] for start, end in zip(cuts, [*cuts[1:], len(sample)], strict=True)]
        found = self._encode(parts[0])
        for part in parts[1:]:
            found = found + self._encode_within(part)
        return found == self._encode(sample)

    def _at_space(self, text: str, begin: int, end: int) -> int | None:
        """In front of a single space."""
        while (at := text.find(" ", begin, end)) >= 0:
            before, after = text[at - 1 : at], text[at + 1 : at + 2]
            if after and not after.isspace() and not before.isspace() and (before.isalnum() or not self._strips):
                return at
            begin = at + 1
        return None

    def _behind_break(self, text: str, begin: int, end: int) -> int | None:
        """Behind a single line break."""
        while (at := text.find("\n", begin, end)) >= 0:
            before, after = text[at - 1 : at], text[at + 1 : at + 2]
            if after and not after.isspace() and not before.isspace() and (after.isalnum() or not self._strips):
                return at + 1
            begin = at + 1
        return None

    def _behind_mark(self, text: str, begin: int, end: int) -> int | None:
        """Behind a special token."""
        ends = (at + len(name) for name in self._marks if (at := text.find(name, begin, end)) >= 0)
        return min((at for at in ends if at < len(text)), default=None)


def _marks(added: Sequence[AddedToken]) -> list[str]:
    """The special tokens, if an occurrence of one in a text is always that token."""
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return []
    names = [str(token) for token in added]
    begins, whole = {name[:end] for name in names for end in range(1, len(name))}, set(names)
    for name in names:
        places = [(at, end) for at in range(len(name)) for end in range(at + 1, len(name) + 1) if end - at < len(name)]
        if any(name[at:] in begins for at in range(1, len(name))) or any(name[at:end] in whole for at, end in places):
            return []
    return names


def groups_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in order, in groups that are encoded at once: together about as long as a piece, or one longer text."""
    group, size = list[str](), 0
    for text in texts:
        if group and size + len(text) > PIECE_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group
