"""Grammars for the fake model: its tokens are single bytes and some words of JSON; the last id ends the sequence."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from support.fake_engine import VOCAB, choose

from common.base.errors import KvRelayError
from common.control.messages import AttemptKey, Grammar, SamplingParams
from common.engine.grammar.compile import compile_grammar
from common.engine.grammar.compiler import GrammarCompiled
from common.engine.grammar.state import GrammarState

EOS = VOCAB - 1
_WORDS = ['{"', '":', '",', '"}', "true", "false", "null", "name", "count", "items", "ing", "the ", "12", "345"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["first kind", "second kind"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}


class _Tokens:
    """The vocabulary as llguidance reads it."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = tuple(
        bytes([i]) if i < 256 else _WORDS[i - 256].encode() if i - 256 < len(_WORDS) else b"\xff<%d>" % i
        for i in range(VOCAB)
    )
    is_tokenizer_wrapper = True

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def fake_tokenizer() -> LLTokenizer:
    return LLTokenizer(_Tokens(), n_vocab=VOCAB, eos_token=[EOS])  # type: ignore[arg-type]


def text_of(token_ids: list[int]) -> str:
    return b"".join(_Tokens.tokens[token_id] for token_id in token_ids if token_id != EOS).decode(errors="replace")


def json_grammar(schema: dict[str, Any] = SCHEMA, after: tuple[int, ...] = ()) -> Grammar:
    """A schema's grammar, without whitespace."""
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    return Grammar(source, list(after))


def allowed_by(mask: bytes | None) -> set[int]:
    """The token ids that a mask allows."""
    assert mask is not None
    return {token_id for token_id in range(min(VOCAB, len(mask) * 8)) if mask[token_id // 8] >> token_id % 8 & 1}


def constrained(prompt: list[int], params: SamplingParams) -> list[int]:
    """The fake model's answer under a grammar, whose state is rebuilt for each token."""
    assert params.grammar is not None
    matcher = compile_grammar(fake_tokenizer(), params.grammar.source)
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        state = GrammarState(matcher.deep_copy(), params, len(prompt), [EOS])
        state.take(prompt + answer)
        state.prepare()
        if state.complete and answer:
            break
        answer.append(choose(prompt + answer, (), state.mask()))
        if answer[-1] in params.stop_token_ids:
            break
    return answer


class FakeGrammars:
    """A `common.engine.grammar.compiler.GrammarCompiler` that compiles when a test calls `compile_all`, or at once."""

    eos_ids = [EOS]

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.post: Callable[[GrammarCompiled], None] = lambda _: None
        self.wanted: list[tuple[AttemptKey, str]] = []
        self._cache: dict[str, LLMatcher] = {}

    def cached(self, source: str) -> LLMatcher | None:
        if self.at_once and source not in self._cache:
            self._cache[source] = compile_grammar(fake_tokenizer(), source)
        return self._cache.get(source)

    def compile(self, key: AttemptKey, source: str) -> None:
        self.wanted.append((key, source))

    def compile_all(self) -> None:
        wanted, self.wanted = self.wanted, []
        for key, source in wanted:
            try:
                result: LLMatcher | KvRelayError = compile_grammar(fake_tokenizer(), source)
            except KvRelayError as error:
                result = error
            self.post(GrammarCompiled(key, result))
