"""Grammars are compiled once, on a thread, before a request goes to nodes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.base.errors import BadRequest, ConfigError, Overloaded
from common.engine.grammar.compile import compile_grammar
from common.model.config import load_model_config
from common.model.hub import resolve_model
from router.structured import checker as module
from router.structured.checker import GrammarChecker
from router.text.tokenizer import Tokenizer

DEMO = resolve_model("demo")
CONFIG = load_model_config(DEMO)
TOKENIZER: LLTokenizer = Tokenizer(DEMO).for_grammars(CONFIG.vocab_size, CONFIG.eos_token_ids)


class Compiling:
    """Counts compilations, and holds them while `go` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.go = threading.Event()
        self.go.set()
        monkeypatch.setattr(module, "compile_grammar", self)

    def __call__(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(30)
        return compile_grammar(tokenizer, source)


def test_results_are_remembered_and_computed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, checker = Compiling(monkeypatch), GrammarChecker(TOKENIZER)

    async def run() -> None:
        for _ in range(3):
            await checker.check('start: "a"', "guided_grammar")
            with pytest.raises(BadRequest, match=r"guided_regex: [^$]*unclosed group") as caught:
                await checker.check("start: /(/", "guided_regex")
            assert caught.value.param == "guided_regex"
            with pytest.raises(BadRequest, match=r"structured_outputs\.regex: ") as caught:
                await checker.check("start: /(/", "structured_outputs.regex")
            assert caught.value.param == "structured_outputs", "as of errors that are found earlier"

    asyncio.run(run())
    assert len(compiling.threads) == 2
    assert threading.current_thread().name not in compiling.threads


def test_the_loop_goes_on_while_a_grammar_is_compiled_and_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, checker = Compiling(monkeypatch), GrammarChecker(TOKENIZER)
    compiling.go.clear()
    monkeypatch.setattr(module, "_MAX_WAITING", 2)
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)

    async def run() -> list[BaseException | None]:
        checks = [checker.check(f'start: "{n}"', "guided_grammar") for n in range(4)]
        try:
            return await asyncio.gather(*checks, return_exceptions=True)
        finally:
            compiling.go.set()

    results = asyncio.run(run())
    assert [type(result) for result in results] == [Overloaded] * 4
    assert "are being compiled" in str(results[2])
    assert "within" in str(results[0])


def test_requests_that_come_together_with_one_grammar_have_it_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, checker = Compiling(monkeypatch), GrammarChecker(TOKENIZER)
    monkeypatch.setattr(module, "_MAX_WAITING", 2)

    async def run() -> list[BaseException | None]:
        sources = ['start: "a"'] * 50 + ["start: /(/"] * 50
        checks = [asyncio.create_task(checker.check(source, "guided_grammar")) for source in sources]
        await asyncio.sleep(0)
        checks[0].cancel()  # the others wait on
        return await asyncio.gather(*checks, return_exceptions=True)

    found = [type(result) for result in asyncio.run(run())]
    assert found == [asyncio.CancelledError] + [type(None)] * 49 + [BadRequest] * 50
    assert len(compiling.threads) == 2


def test_time_for_which_the_process_is_stopped_does_not_use_up_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, checker = Compiling(monkeypatch), GrammarChecker(TOKENIZER)
    compiling.go.clear()
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 2.0)

    async def run() -> None:
        check = asyncio.create_task(checker.check('start: "a"', "guided_grammar"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the check waits
        time.sleep(2.5)  # nothing in this process goes on
        asyncio.get_running_loop().call_soon(compiling.go.set)
        await check

    asyncio.run(run())


def test_a_model_whose_tokens_cannot_be_used_takes_no_grammars() -> None:
    with pytest.raises(BadRequest, match="this model takes no grammars: why not"):
        asyncio.run(GrammarChecker(ConfigError("why not")).check('start: "a"', "guided_grammar"))
