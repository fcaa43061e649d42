"""Compiling grammars with llguidance, within limits. No torch: the router validates with the same code.

Everything that a hostile grammar can make expensive is bounded here: compiling (`initial_lexer_fuel`), the work and memory
of any later mask (`step_lexer_fuel`, `step_max_items`, `max_lexer_states`). Compiling releases the GIL; building the
tokenizer does not (0.6 s for 150,000 tokens).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel

from common.base.errors import BadRequest, ConfigError, as_config_error
from common.base.free_memory import release_free_memory
from common.model.added_tokens import complete_from

MAX_SOURCE_CHARS = 1 << 18
MAX_ERROR_CHARS = 400
COMPILE_TIMEOUT_S = 10.0
"""Longest wait for a grammar's compilation, others in the queue included."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Some 20 ms for compiling, 10 ms for the worst mask, 20 MB for a grammar's lexer."""
_BEGINNING = "\x02"
"""A character that is always a token of its own."""
_SPECIAL = b"\xff"
"""First byte of special tokens for llguidance."""


def load_tokenizer(folder: Path, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """The tokens of a model folder as llguidance needs them to compute masks.

    Raises: ConfigError if there is no usable tokenizer.json, or other files add tokens that it cannot have.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"no tokenizer.json in {folder}: grammars need it")
    with as_config_error(f"llguidance cannot use {file}", MAX_ERROR_CHARS):
        tokenizer = Tokenizer.from_file(str(file))
    complete_from(folder, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    with as_config_error(f"llguidance cannot use {file}", MAX_ERROR_CHARS):
        return _llguidance_tokenizer(tokenizer, encode, file, vocab_size, eos_ids)


def checking_tokenizer(
    file: Path, tokenizer: Tokenizer, encode: Callable[[str], list[int]], vocab_size: int, eos_ids: Iterable[int]
) -> LLTokenizer:
    """The tokens of a model for a process that has loaded tokenizer.json (`file`), and compiles grammars but computes few masks:
    these take longer, but the tokenizer takes less memory.

    encode: the tokens of a text, none of them special. Raises: ConfigError if the tokenizer cannot be used.
    """
    with as_config_error(f"llguidance cannot use {file}", MAX_ERROR_CHARS):
        return _llguidance_tokenizer(tokenizer, encode, file, vocab_size, eos_ids, slices=[])


def _llguidance_tokenizer(
    tokenizer: Tokenizer,
    encode: Callable[[str], list[int]],
    file: Path,
    vocab_size: int,
    eos_ids: Iterable[int],
    slices: list[str] | None = None,
) -> LLTokenizer:
    """slices: regular expressions of tokens whose masks are prepared; None: llguidance's own choice."""
    ends = [token_id for token_id in sorted(set(eos_ids)) if 0 <= token_id < vocab_size]
    tokens = byte_level_tokens(tokenizer, vocab_size) or parsed_tokens(file, vocab_size)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if is_special(token) and token_id < vocab_size:  # perhaps by another file
            tokens[token_id] = _SPECIAL + token.content.encode()
    text = _TextTokenizer(encode, tokens, ends)
    made = LLTokenizer(cast("TokenizerWrapper", text), n_vocab=vocab_size, eos_token=ends or None, slices=slices)
    text.tokens = []  # `made` has its own copy, and keeps `text`
    release_free_memory()  # of a large vocabulary's file, 30 MB
    return made


def parsed_tokens(file: Path, vocab_size: int) -> list[bytes]:
    """The bytes of every token as llguidance reads them from any tokenizer.json; those of a special token begin with 0xff,
    which no text does. Raises: ValueError."""
    # Slices only speed up masks, and this tokenizer computes none.
    parsed = LLTokenizer(str(file), n_vocab=vocab_size, slices=[])
    marks = {True: _SPECIAL, False: b""}
    return [marks[parsed.is_special_token(i)] + parsed.decode_bytes([i]) for i in range(parsed.vocab_size)]


def byte_level_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[bytes] | None:
    """`parsed_tokens` in a third of its time, for tokenizers whose tokens have one character for every byte, as most with large
    vocabularies do; None for others.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    if not isinstance(tokenizer.decoder, ByteLevel) or max([*vocab.values(), *added], default=0) >= vocab_size:
        return None
    written = _bytes_of("".join(vocab))
    if written is None:
        return None
    tokens: list[bytes | None] = [None] * vocab_size
    start = 0
    for token, token_id in vocab.items():
        tokens[token_id] = written[start : start + len(token)]
        start += len(token)
    for token_id, token in added.items():
        text = token.content
        if is_special(token):
            tokens[token_id] = _SPECIAL + text.encode()
        else:
            tokens[token_id] = _bytes_of(text) or text.encode()
    return [_SPECIAL + b"<[%d]>" % token_id if each is None else each for token_id, each in enumerate(tokens)]


def is_special(token: AddedToken) -> bool:
    """Whether an added token is special for llguidance, whatever tokenizer.json says: grammars must name it, their text is never
    this token. `<tool_call>` and `<think>` of Qwen are not special for tokenizers.
    """
    return token.special or (token.content.startswith("<") and token.content.endswith(">"))


def _bytes_of(text: str) -> bytes | None:
    """The bytes that the characters of byte-level tokens stand for; None if a character stands for no byte."""
    try:
        return text.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _bytes_of_characters() -> dict[int, str]:
    """GPT-2's table, for `str.translate`: printable bytes are written as they are, the others as the characters from 256 on;
    so no byte is written as one of these others, which become a character that is no byte."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {256 + i: chr(byte) for i, byte in enumerate(others)} | dict.fromkeys(others, "\ufffd")


_BYTE_OF_CHARACTER = _bytes_of_characters()


class _TextTokenizer:
    """llguidance's interface of a tokenizer that never makes a special token of text: the text `<|eos|>` in a grammar is
    text to be written, and one that grammars name without quotes is the token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, encode: Callable[[str], list[int]], tokens: list[bytes], ends: list[int]) -> None:
        """`encode`: makes no tokens that tokenizer.json calls special; `tokens`: see `parsed_tokens`; `ends`: tokens that end an
        answer."""
        self.tokens = [token.removeprefix(_SPECIAL) for token in tokens]
        adds_space = b"".join(self.tokens[token_id] for token_id in encode("a")) == b" a"
        self._encode = without_space(encode) if adds_space else encode
        self.special_token_ids = [token_id for token_id, token in enumerate(tokens) if token.startswith(_SPECIAL)]
        self._special = {each: self.tokens[each].decode(errors="replace") for each in self.special_token_ids}
        self.eos_token_id = ends[0] if ends else 0  # llguidance needs one that exists

    def __call__(self, text: str) -> list[int]:
        ids = self._encode(text)
        found = {self._special[each] for each in ids if each in self._special}
        # Cut behind their first character: `router.text.typed_tokens` does the same.
        cuts = [f"(?<={re.escape(each[0])})(?={re.escape(each[1:])})" for each in found if len(each) > 1]
        parts = re.split("|".join(cuts), text) if cuts else [text]
        return ids if len(parts) == 1 else [token_id for part in parts for token_id in self(part)]


def without_space(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """`encode` of a tokenizer that puts a space before the beginning of a text, for texts that stand within others: what
    grammars force would not fit them."""
    before = encode(_BEGINNING)

    def encode_within(text: str) -> list[int]:
        ids = encode(_BEGINNING + text)
        return ids[len(before) :] if before and ids[: len(before)] == before else encode(text)

    return encode_within


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the start of a grammar. Sequences get a `deep_copy` of it.

    source: the format of `common.control.messages.Grammar.source`.
    Raises: BadRequest with llguidance's message.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise BadRequest(f"the grammar has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    first = matcher.deep_copy()
    if not first.is_error():
        # The first step prepares the lexer, which the copies share, and may exceed a limit.
        first.consume_tokens(first.compute_ff_tokens())
        first.compute_bitmask()
    if first.is_error():
        raise BadRequest(f"the grammar cannot be compiled: {short_error(first.get_error())}")
    return matcher


def short_error(message: str) -> str:
    """llguidance's message without its debug suffix."""
    return message.replace("<non-verbose/>", "").strip()[:MAX_ERROR_CHARS]
