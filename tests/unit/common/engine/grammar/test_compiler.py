"""A node's grammars are compiled on a thread within limits, and kept."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from common.base.errors import BadRequest
from common.control.messages import AttemptKey, Grammar, SamplingParams
from common.engine.grammar import compiler as module
from common.engine.grammar.compile import MAX_SOURCE_CHARS
from common.engine.grammar.compiler import GrammarCompiled, GrammarCompiler
from common.engine.grammar.state import GrammarState
from common.model.config import load_model_config
from common.model.hub import resolve_model

DEMO = resolve_model("demo")
HOSTILE = {
    "nested repetition": "start: /((x{1000}){1000}){1000}/",
    "nested repetition later": 'start: "a" /((x{1000}){1000}){1000}/',
    "intersections": "start: A\nA: " + " & ".join(f"/.*{letter}.{{8}}.*/" for letter in "abcdef"),
    "enumeration": LLMatcher.grammar_from_json_schema({"enum": [f"value {n * 7919 % 100003}" for n in range(20000)]}),
    "unknown name": "start: other",
    "look-around": "start: /(?=a)b/",
    "unclosed": "start: (",
    "no rule": "",
    "too long": 'start: "' + "a" * MAX_SOURCE_CHARS + '"',
    "impossible": "start: /a/ & /b/",
    "multiple": LLMatcher.grammar_from_json_schema('{"type": "integer", "multipleOf": 1000003, "minimum": 1}'),
    "not JSON": '{"grammars": 3}',
}


class Node:
    """A compiler of the demo model and the events that it posted."""

    def __init__(self, folder: Path = DEMO) -> None:
        config = load_model_config(DEMO)
        self.events: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()
        self.grammars = GrammarCompiler(folder, config.vocab_size, config.eos_token_ids, self.events.put)

    def compile(self, source: str) -> object:
        self.grammars.compile(AttemptKey("r", 1), source)
        return self.events.get(timeout=60).result


def test_a_grammar_is_compiled_once_and_kept_while_others_are_not_used_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CACHED", 2)
    node = Node()
    node.grammars.preload()
    sources = [f'start: "{letter}"' for letter in "abc"]
    first = node.compile(sources[0])
    assert isinstance(first, LLMatcher)
    node.compile(sources[1])
    assert node.compile(sources[0]) is node.grammars.cached(sources[0]) is first
    node.compile(sources[2])
    assert [node.grammars.cached(source) is not None for source in sources] == [True, False, True]
    node.grammars.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_is_wrong_or_too_complex_ends_in_an_error(name: str) -> None:
    node = Node()
    error = node.compile(HOSTILE[name])
    assert isinstance(error, BadRequest)
    assert error.message.startswith("the grammar ")
    assert len(error.message) < 500
    assert isinstance(node.compile('start: "a"'), LLMatcher), "the next one is compiled"
    node.grammars.close()


@pytest.mark.parametrize(
    "source",
    [
        'start: s\ns: s s | "a" | "b" | s "c" s',
        "start: s\ns: s s s | /[a-z]/ | s s",
    ],
)
def test_masks_that_become_too_expensive_end_in_an_error_of_their_sequence(source: str) -> None:
    node = Node()
    matcher = node.compile(source)
    node.grammars.close()
    assert isinstance(matcher, LLMatcher)
    params = SamplingParams(0, 2000, grammar=Grammar(source))
    with pytest.raises(BadRequest, match="the grammar failed: "):
        _walk(GrammarState(matcher.deep_copy(), params, 0, node.grammars.eos_ids), params.max_tokens)


def _walk(state: GrammarState, max_tokens: int) -> None:
    answer: list[int] = []
    while len(answer) < max_tokens:
        state.take(answer)
        state.prepare()
        mask = np.unpackbits(np.frombuffer(state.mask() or b"", np.uint8), bitorder="little")
        answer.append(int(np.flatnonzero(mask)[0]))


def test_a_model_without_tokenizer_takes_no_grammars(tmp_path: Path) -> None:
    node = Node(tmp_path)
    error = node.compile('start: "a"')
    assert isinstance(error, BadRequest)
    assert "no tokenizer.json" in error.message
    node.grammars.close()
