"""Token ids to text, one token at a time. Pure; runs in the router process, on its event loop.

There are three kinds of tokenizer, each with its own rule; the tokenizer's decoder tells which kind it is:

    bytes     (byte-level BPE: GPT-2, Llama 3, Qwen)  a token is a few bytes, at any position
    fallback  (sentencepiece with <0xE4> tokens)      a token is text, or one byte of a character
    text      (everything else)                       a token is text that may depend on the one before

A character is emitted when its last byte arrives, never earlier, so no delta contains half a character.
The work per token is constant: nothing is decoded twice.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

Kind = Literal["bytes", "fallback", "text"]


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _decoder_types(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_types(part)]
    return [decoder["type"]]


class TokenPieces:
    """The text or bytes of each token id; one object per tokenizer, shared by all its streams.

    Ids that the tokenizer does not know have no text (a model's vocabulary is often padded).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        # __getstate__ serializes the decoder alone to JSON; to_str() would serialize the whole vocabulary with it.
        types = _decoder_types(None if decoder is None else json.loads(decoder.__getstate__()))
        self.kind: Kind = "text"
        if types and set(types) <= {"ByteLevel", "Fuse"}:
            self.kind = "bytes"
        elif "ByteFallback" in types:
            self.kind = "fallback"
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.piece = cache(self._piece)
        """The bytes that a token adds in the middle of a text; they may be part of a character."""
        self.alone = cache(self._alone)
        """The text of a sequence of only this token."""
        self.raw_bytes = self._find_raw_bytes() if self.kind == "fallback" else {}
        """The byte of each `fallback` token <0xXX>, by token id."""
        self._anchor = self._find_anchor()

    def _find_raw_bytes(self) -> dict[int, int]:
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        found = ((token_id, _BYTE_TOKEN.match(token)) for token, token_id in vocab.items())
        return {token_id: int(match[1], 16) for token_id, match in found if match}

    def _find_anchor(self) -> int | None:
        """An ordinary token with text, to be decoded before another one if the decoder treats the first token specially."""
        if self.kind == "bytes":
            return None
        for token_id in range(self._tokenizer.get_vocab_size()):
            if token_id not in self.special_ids and token_id not in self.raw_bytes and self.alone(token_id).strip():
                return token_id
        return None

    def last_ordinary(self, token_ids: Sequence[int]) -> int | None:
        """The last of these that is neither special nor a byte; None if there is none, or if no token depends on it."""
        if self.kind == "bytes":
            return None
        ordinary = (each for each in reversed(token_ids) if each not in self.special_ids and each not in self.raw_bytes)
        return next(ordinary, None)

    def _alone(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def after(self, previous: int | None, token_id: int) -> str:
        """The text that `token_id` adds to a non-empty text whose last ordinary token is `previous`."""
        before = self._anchor if previous is None else previous
        if before is None:
            return self.alone(token_id)
        return self._tokenizer.decode([before, token_id], skip_special_tokens=False)[len(self.alone(before)) :]

    def _piece(self, token_id: int) -> bytes:
        raw = self.raw_bytes.get(token_id)
        if raw is not None:
            return bytes([raw])
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.kind != "bytes":
            return self.after(None, token_id).encode(errors="replace")
        table = _byte_of_char()
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode()  # an added token, kept as it is written


class Detokenizer:
    """One stream of text. Invariant: the deltas of `push` and the last one of `flush`, joined, equal what these ids add to the
    tokenizer's own decoding of the prompt, with one exception: if a run of fallback bytes becomes invalid, the
    characters completed before it remain (a decode of the whole would replace them; a stream cannot).

    `visible`: special tokens that are not skipped. `prompt_ids`: of the text before; many tokenizers strip the space of a
    text's first token only.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._pieces = pieces
        self._skip: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._skip = pieces.special_ids - visible if visible else pieces.special_ids
        self._utf8 = _Utf8Decoder(errors="replace")
        self._run = bytearray()
        """Bytes of an incomplete character at the end of a run of fallback bytes."""
        self._run_invalid = False
        self._previous = pieces.last_ordinary(prompt_ids)
        self._begun = self._previous is not None or any(each in pieces.raw_bytes for each in prompt_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; often empty."""
        if token_id in self._skip:
            return ""
        pieces = self._pieces
        if pieces.kind == "bytes":
            piece = pieces.piece(token_id)
            return piece.decode() if piece.isascii() and not self._utf8.buffer else self._utf8.decode(piece)
        raw = pieces.raw_bytes.get(token_id)
        if raw is not None:
            return self._push_byte(token_id, raw)
        head = self._end_run()
        tail = pieces.after(self._previous, token_id) if self._begun else pieces.alone(token_id)
        self._begun, self._previous = True, token_id
        return head + tail

    def flush(self) -> str:
        """The rest after the last token: a replacement character for an incomplete character."""
        return self._utf8.decode(b"", final=True) + self._end_run()

    def _push_byte(self, token_id: int, byte: int) -> str:
        if not self._begun:
            self._begun = True
            if not self._pieces.alone(token_id):
                return ""  # a leading space that this decoder strips
        self._run.append(byte)
        if self._run_invalid:
            return self._take_run_as_invalid()
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            if error.end == len(self._run) and error.reason == "unexpected end of data":
                return ""
            self._run_invalid = True
            return self._take_run_as_invalid()
        self._run.clear()
        return text

    def _take_run_as_invalid(self) -> str:
        text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _end_run(self) -> str:
        self._run_invalid = False
        return self._take_run_as_invalid()
