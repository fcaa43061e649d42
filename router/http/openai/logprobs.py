"""Log-probabilities as the two completion calls show them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.control.messages import TokenLogprobs
from router.http.json_body import Json
from router.requests.request import Delta
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> list[Json]:
    """The log-probability entries of `/v1/chat/completions`."""
    entries: list[Json] = []
    for token_id, found in zip(delta.token_ids, delta.logprobs or [], strict=False):
        entry = _chat_entry(tokenizer, token_id, found.logprob)
        entry["top_logprobs"] = [
            _chat_entry(tokenizer, other, logprob)
            for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        ]
        entries.append(entry)
    return entries


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    piece = tokenizer.pieces.piece(token_id)
    return {"token": piece.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(piece)}


class TextLogprobs:
    """The log-probabilities of `/v1/completions`, whose text offsets continue from chunk to chunk.

    A token's offset is that of the first character in the choice's text that the token contains, wholly or in part.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer.pieces, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        """The `logprobs` object of these tokens."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for token_id, found in zip(token_ids, logprobs, strict=False):
            text = self._tokenizer.text_of(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(self._text.push(token_id))
            pairs = zip(found.top_ids, found.top_logprobs, strict=True)
            top = {self._tokenizer.text_of(other): max(logprob, _LOWEST) for other, logprob in pairs}
            top.setdefault(text, max(found.logprob, _LOWEST))
            tops.append(top)
        values = [max(found.logprob, _LOWEST) for found in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
