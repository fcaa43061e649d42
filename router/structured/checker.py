"""Validates grammars with the model's tokens before a request is sent to nodes. Runs on the router's event loop.

Compiling happens on a thread, within the limits and with the code of the nodes (`common.engine.grammar.compile`): what passes
here compiles there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from llguidance import LLTokenizer

from common.base.errors import BadRequest, ConfigError, Overloaded
from common.engine.grammar.compile import COMPILE_TIMEOUT_S, compile_grammar

_MAX_KEPT = 512
"""Sources whose result is remembered; at most 128 MB in all."""
_MAX_WAITING = 64
"""Sources that may wait for their turn."""


@dataclass(slots=True, eq=False)
class _Compilation:
    """One source, compiled once for all requests that came with it at the same time."""

    work: asyncio.Task[str]
    waiting: int = 0
    """Number of requests that wait for it; at zero it is cancelled."""


class GrammarChecker:
    """One model's grammars. tokenizer: or why the model has none that llguidance can use."""

    def __init__(self, tokenizer: LLTokenizer | ConfigError) -> None:
        self._tokenizer = tokenizer
        self._results: OrderedDict[str, str] = OrderedDict()
        """The error of each source, empty if it is valid; least recently used first."""
        self._unknown: dict[str, _Compilation] = {}
        """The sources for whose result requests wait."""
        self._one_at_a_time = asyncio.Lock()

    async def check(self, source: str, place: str) -> None:
        """Raises: BadRequest if the grammar at this place of the body cannot be used, Overloaded if that is not known in time."""
        problem = self._results.get(source)
        if problem is None:
            problem = await self._compile(source)
            self._results[source] = problem
            while len(self._results) > _MAX_KEPT:
                self._results.popitem(last=False)
        else:
            self._results.move_to_end(source)
        if problem:
            raise BadRequest(f"{place}: {problem}", param=place.partition(".")[0])

    async def _compile(self, source: str) -> str:
        tokenizer = self._tokenizer
        if isinstance(tokenizer, ConfigError):
            return f"this model takes no grammars: {tokenizer}"
        compilation = self._unknown.get(source)
        if compilation is None:
            if len(self._unknown) >= _MAX_WAITING:
                raise Overloaded(f"{len(self._unknown)} grammars are being compiled")
            work = asyncio.create_task(self._compile_in_turn(tokenizer, source))
            compilation = self._unknown[source] = _Compilation(work)
        compilation.waiting += 1
        try:
            for _ in range(2):  # time for which this process was stopped (SIGSTOP) uses up one wait at most
                if (await asyncio.wait([compilation.work], timeout=COMPILE_TIMEOUT_S / 2))[0]:
                    return compilation.work.result()
            raise Overloaded(f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s")
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.work.cancel()
                del self._unknown[source]

    async def _compile_in_turn(self, tokenizer: LLTokenizer, source: str) -> str:
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(compile_grammar, tokenizer, source)
            except BadRequest as error:
                return error.message
        return ""
