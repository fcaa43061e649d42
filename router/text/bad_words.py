"""Bad words as the token sequences that write them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def bad_word_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The token sequences of each word at the start of a text, and after a space if that is a different sequence of as many
    tokens. `encode`: without special tokens.

    Source: vLLM, `SamplingParams.update_from_tokenizer`: a word that a space makes longer begins with a token of its own,
    and the first sequence covers it.
    """
    found: list[list[int]] = []
    for word in words:
        plain = encode(word.lstrip())
        spaced = encode(" " + word.lstrip())
        found += [plain] if plain else []
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
