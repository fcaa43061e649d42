"""A node's grammars: compiled on a thread of their own, kept while they are in use.

`GrammarCompiler` belongs to the engine thread, which never waits: a grammar that is not compiled yet is asked for with
`compile`, and comes as a `GrammarCompiled` event.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from common.base.errors import BadRequest, ConfigError, KvRelayError
from common.control.messages import AttemptKey
from common.engine.grammar.compile import compile_grammar
from common.engine.grammar.shared_tokenizers import get_tokenizer

_MAX_CACHED = 64
"""Compiled grammars; each may use 20 MB."""


@dataclass(frozen=True)
class GrammarCompiled:
    """The matcher of the grammar that `key` waits for, or why there is none."""

    key: AttemptKey
    result: LLMatcher | KvRelayError


class GrammarCompiler:
    """A node's compiled grammars. `post` hands over events, on any thread."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_ids: Iterable[int], post: Callable[[GrammarCompiled], None]
    ) -> None:
        """folder: with tokenizer.json. eos_ids: the model's end-of-sequence tokens."""
        self.eos_ids = list(eos_ids)
        self._folder, self._vocab_size = folder, vocab_size
        self._post = post
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        """By source, least recently used first."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def preload(self) -> None:
        """Build the tokenizer now, unless it is shared. Later it would hold up the process's other threads, because it keeps the
        GIL."""
        self._thread.submit(lambda: self._tokenizer)

    def cached(self, source: str) -> LLMatcher | None:
        """The matcher of a grammar at its start, to be copied; None if it is not compiled yet."""
        with self._lock:
            matcher = self._cache.get(source)
            if matcher is not None:
                self._cache.move_to_end(source)
            return matcher

    def compile(self, key: AttemptKey, source: str) -> None:
        """Compile a grammar; `GrammarCompiled(key, ...)` follows."""
        self._thread.submit(self._compile, key, source)

    def close(self) -> None:
        """End the thread after what it compiles now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: AttemptKey, source: str) -> None:
        try:
            result: LLMatcher | KvRelayError = self.cached(source) or self._compiled(source)
        except ConfigError as error:
            result = BadRequest(f"this node takes no grammars: {error}")
        except KvRelayError as error:
            result = error
        self._post(GrammarCompiled(key, result))

    def _compiled(self, source: str) -> LLMatcher:
        matcher = compile_grammar(self._tokenizer, source)
        with self._lock:
            self._cache[source] = matcher
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return get_tokenizer(self._folder, self._vocab_size, self.eos_ids)
