"""Log-probabilities as the two completion calls show them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from common.control.messages import PromptLogprobs, TokenLogprobs
from common.control.whole_vocabulary import most_likely_of
from router.http.json_body import Json, RawJson, in_slices
from router.requests.request import Delta
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


_PORTION = 64
"""Tokens whose log-probabilities, up to `_USUAL` for each, are formatted before other tasks of the event loop run."""
_USUAL = 20


def portion_of(found: Sequence[TokenLogprobs | PromptLogprobs], portion: int = _PORTION) -> int:
    """How many positions of this kind are formatted before other tasks of the event loop run."""
    if not found:
        return portion
    return 1 if found[0].whole else max(1, portion * _USUAL // max(_USUAL, len(found[0].top_ids)))


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def prompt_entry(tokenizer: Tokenizer, token_id: int, found: PromptLogprobs) -> Json | RawJson:
    """One position in `prompt_logprobs`: the prompt's token, then the most likely ones, by token id."""
    own = str(token_id), _ranked(tokenizer, token_id, found.logprob, found.rank)
    others = (
        (str(other), _ranked(tokenizer, other, logprob, rank))
        for rank, (other, logprob) in enumerate(most_likely_of(found), 1)
        if other != token_id
    )
    pairs = chain([own], others)
    return in_slices(pairs, dict) if found.whole else dict(pairs)


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> Json:
    return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": tokenizer.text_of(token_id)}


def chat_logprobs(tokenizer: Tokenizer, delta: Delta, *, tokens_as_ids: bool) -> list[Json]:
    """The log-probability entries of `/v1/chat/completions`."""

    def shown(token_id: int, logprob: float) -> Json:
        piece = _as_id(token_id).encode() if tokens_as_ids else tokenizer.pieces.piece(token_id)
        return {"token": piece.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(piece)}

    entries: list[Json] = []
    for token_id, found in zip(delta.token_ids, delta.logprobs or [], strict=False):
        entry = shown(token_id, found.logprob)
        others = (shown(other, logprob) for other, logprob in most_likely_of(found))
        entry["top_logprobs"] = in_slices(others, list) if found.whole else list(others)
        entries.append(entry)
    return entries


class TextLogprobs:
    """The log-probabilities of `/v1/completions`, whose text offsets continue from chunk to chunk.

    A token's offset is that of the first character in the choice's text that the token contains, wholly or in part.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, tokens_as_ids: bool) -> None:
        self._name = _as_id if tokens_as_ids else tokenizer.text_of
        self._pieces, self._skip_special_tokens = tokenizer.pieces, skip_special_tokens
        self.begin_text()

    def begin_text(self, prompt_ids: Sequence[int] = (), offset: int = 0) -> None:
        """Go on with the text behind these tokens, which begins at `offset` of the choice's text."""
        self._text = Detokenizer(self._pieces, skip_special_tokens=self._skip_special_tokens, prompt_ids=prompt_ids)
        self._offset, self._echo = offset, ""

    def render_prompt(self, token_ids: Sequence[int], logprobs: Sequence[PromptLogprobs], text: str) -> Iterator[Json]:
        """The `logprobs` objects of an echoed prompt, in portions; the answer's offsets continue after its `text`. Which special
        tokens are in that does not depend on `skip_special_tokens`: it may be the client's own text.
        """
        found = [None, *logprobs]
        self._text, self._echo = Detokenizer(self._pieces), text
        portion = portion_of(logprobs)
        for start in range(0, len(token_ids), portion):
            yield self.render(token_ids[start : start + portion], found[start : start + portion])
        self.begin_text(token_ids, len(text))

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | PromptLogprobs | None]) -> Json:
        """The `logprobs` object of these tokens. None: the first token of a prompt has no log-probability."""
        tokens: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, Any] | RawJson | None] = []
        for token_id, found in zip(token_ids, logprobs, strict=False):
            text = self._name(token_id)
            tokens.append(text)
            offsets.append(self._take_offset(token_id))
            if found is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(max(found.logprob, LOWEST))
            top = {text: max(found.logprob, LOWEST)}  # as in vLLM, the token itself comes first
            for other, logprob in most_likely_of(found):
                top[self._name(other)] = max(logprob, LOWEST)
            tops.append(in_slices(iter(top.items()), dict) if found.whole else top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _take_offset(self, token_id: int) -> int:
        """The offset of the next token."""
        piece, shown = self._pieces.piece(token_id).decode(errors="replace"), self._text.push(token_id)
        if token_id in self._pieces.special_ids and self._echo.startswith(piece, self._offset):
            shown = piece
        # Replacement characters for bytes of earlier tokens, shown before this token's own text.
        before = max(0, len(shown) - len(piece)) if shown.endswith(piece) else 0
        self._offset += len(shown)
        return self._offset - len(shown) + before
