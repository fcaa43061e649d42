"""Compiling grammars with llguidance, within limits. No torch: the router validates with the same code.

Everything that a hostile grammar can make expensive is bounded here: compiling (`initial_lexer_fuel`), the work and memory
of any later mask (`step_lexer_fuel`, `step_max_items`, `max_lexer_states`). Compiling releases the GIL; building the
tokenizer does not (0.9 s for 150,000 tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from common.base.errors import BadRequest, ConfigError, is_bug_of_library

log = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 1 << 18
MAX_ERROR_CHARS = 400
COMPILE_TIMEOUT_S = 10.0
"""Longest wait for a grammar's compilation, others in the queue included."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Some 20 ms for compiling, 10 ms for the worst mask, 20 MB for a grammar's lexer."""


def load_tokenizer(folder: Path, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """The tokens of a model folder as llguidance needs them.

    Raises: ConfigError if there is no usable tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"no tokenizer.json in {folder}: grammars need it")
    ends = [token_id for token_id in sorted(set(eos_ids)) if 0 <= token_id < vocab_size]
    try:
        # Slices only speed up masks, and this tokenizer computes none.
        parsed = LLTokenizer(str(file), n_vocab=vocab_size, eos_token=ends or None, slices=[])
        text = _TextTokenizer(Tokenizer.from_file(str(file)), parsed)
        return LLTokenizer(cast("TokenizerWrapper", text), n_vocab=vocab_size, eos_token=ends or None)
    except BaseException as error:  # the library raises ValueError, and others for broken files
        if not isinstance(error, Exception) and not is_bug_of_library(error):
            raise
        raise ConfigError(f"llguidance cannot use {file}: {str(error)[:MAX_ERROR_CHARS]}") from error


class _TextTokenizer:
    """llguidance's interface of a tokenizer that never makes a special token of text: the text `<|eos|>` in a grammar is
    text to be written, and one that grammars name without quotes is the token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, parsed: LLTokenizer) -> None:
        """`parsed`: llguidance's own reading of the same file."""
        tokenizer.encode_special_tokens = True
        self._encode = tokenizer.encode
        ids = range(parsed.vocab_size)
        self.tokens = [parsed.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if parsed.is_special_token(token_id)]
        self.eos_token_id = parsed.eos_token

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False).ids


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the start of a grammar. Sequences get a `deep_copy` of it.

    source: as `common.control.messages.Grammar.source`.
    Raises: BadRequest with llguidance's message.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise BadRequest(f"the grammar has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    first = matcher.deep_copy()
    if not first.is_error():
        # The first step prepares the lexer, which the copies share, and may exceed a limit.
        first.consume_tokens(first.compute_ff_tokens())
        first.compute_bitmask()
    if first.is_error():
        raise BadRequest(f"the grammar cannot be compiled: {short_error(first.get_error())}")
    return matcher


def short_error(message: str) -> str:
    """llguidance's message without what it says of its own state."""
    return message.replace("<non-verbose/>", "").strip()[:MAX_ERROR_CHARS]
