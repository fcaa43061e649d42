"""Nodes that a process forks use the tokenizer that it has loaded."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.base.process import run_and_end
from common.config.service_configs import PrefillConfig
from common.control.messages import AttemptKey
from common.engine.grammar import shared_tokenizers
from common.engine.grammar.compiler import GrammarCompiled, GrammarCompiler
from common.engine.grammar.shared_tokenizers import get_tokenizer, share_tokenizer
from common.model.facts import ModelFacts, read_facts
from common.model.hub import DEMO_MODEL_PATH
from common.node.parts import make_grammars
from common.node.plan import plan_node

FACTS: ModelFacts = read_facts(DEMO_MODEL_PATH)


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tokenizers, "_shared", {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights."""
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL_PATH / name, tmp_path)
    return tmp_path


def get(folder: Path, *more_eos: int) -> LLTokenizer:
    return get_tokenizer(folder, FACTS.vocab_size, [*FACTS.eos_token_ids, *more_eos])


def test_it_is_loaded_once(folder: Path) -> None:
    share_tokenizer(folder)
    shared = get(folder)
    share_tokenizer(folder)
    assert get(folder) is shared


def test_a_node_asks_for_the_one_that_is_shared() -> None:
    share_tokenizer(DEMO_MODEL_PATH)
    grammars = make_grammars(plan_node(PrefillConfig(model="demo")), lambda event: None)
    assert grammars._tokenizer is get(DEMO_MODEL_PATH)
    grammars.close()


def test_another_one_is_not_taken_for_it(folder: Path) -> None:
    share_tokenizer(folder)
    shared = get(folder)
    assert get(folder, 7) is not shared
    file = folder / "tokenizer.json"
    file.write_text(file.read_text("utf-8") + "\n", "utf-8")
    assert get(folder) is not shared, "its file has changed"
    share_tokenizer(folder)
    assert get(folder) is get(folder) is not shared


def test_one_with_other_added_tokens_is_not_taken_for_it(folder: Path) -> None:
    share_tokenizer(folder)
    shared = get(folder)
    (folder / "tokenizer_config.json").write_text('{"additional_special_tokens": ["[TOOL]"]}')
    assert get(folder) is not shared
    share_tokenizer(folder)
    assert get(folder) is get(folder) is not shared


@pytest.mark.parametrize("content", [None, "{"])
def test_a_model_without_a_usable_one_is_left_to_its_nodes(folder: Path, content: str | None) -> None:
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    share_tokenizer(folder)
    assert not shared_tokenizers._shared


def _compile_as_a_node_does() -> None:
    shared_tokenizers.load_tokenizer = None  # type: ignore[assignment]
    events: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()
    grammars = GrammarCompiler(DEMO_MODEL_PATH, FACTS.vocab_size, FACTS.eos_token_ids, events.put)
    grammars.preload()
    grammars.compile(AttemptKey("r", 1), 'start: "some text" /[0-9]+/ | "other" <|eos|>')
    result = events.get(timeout=60).result
    assert isinstance(result, LLMatcher)
    assert not result.is_error()


def _fork_a_node() -> None:
    """Share the demo model's tokenizer, fork, and compile a grammar in the new process."""
    threads = os.listdir("/proc/self/task")
    share_tokenizer(DEMO_MODEL_PATH)
    assert os.listdir("/proc/self/task") == threads, "new ones would not survive a fork"
    pid = os.fork()
    if pid == 0:
        run_and_end(_compile_as_a_node_does)
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_forked_node_compiles_grammars_with_it() -> None:
    subprocess.run([sys.executable, __file__], check=True, timeout=120, env={**os.environ, "PYTHONPATH": os.getcwd()})


if __name__ == "__main__":
    _fork_a_node()
