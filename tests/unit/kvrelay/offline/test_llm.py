"""`LLM` in this process with the demo model; tests/integration/test_offline.py compares it with the HTTP API."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvrelay.offline.llm
import kvrelay.offline.run_async
from common.config.service_configs import UpConfig
from common.kernels.native.find import find_native
from kvrelay import LLM, BadRequest, ConfigError, KvRelayError, SamplingParams
from kvrelay.offline.local_node import LocalNode

GREEDY = SamplingParams(temperature=0, max_tokens=12)
connections: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.bind", "socket.connect", "socket.getaddrinfo"):
        connections.append(f"{event} {args}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sys.addaudithook(_hook)
    with LLM(kv_memory_gb=0.05) as llm:
        # The thread that compiles grammars starts with the first one.
        llm.generate("a", SamplingParams(structured_outputs={"choice": ["a"]}))
        yield llm


def attempts(llm: LLM) -> int:
    """Number of requests that the engine holds."""
    node: Any = llm._engine._node  # type: ignore[attr-defined]
    return node._loop.ask(lambda: len(node.core.attempts)).result(10)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"Number {index} is" for index in range(20)]
    lengths = [1 + index % 5 for index in range(20)]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert attempts(llm) == 0


def test_the_answer_does_not_depend_on_what_runs_beside_it(llm: LLM) -> None:
    seeded = SamplingParams(seed=5, max_tokens=12)
    [alone] = llm.generate("My name is", seeded)
    beside = llm.generate(["Hello", "My name is", "The"], seeded)
    assert beside[1].outputs[0] == alone.outputs[0]


def test_a_stop_string_ends_the_answer_and_its_tokens(llm: LLM) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=None, stop="ris"),
    )
    assert output.outputs[0].text == "The capital of France is Pa"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "ris")
    assert attempts(llm) == 0


def test_a_stop_token_is_reported(llm: LLM) -> None:
    [plain] = llm.generate("Hello", GREEDY)
    last = plain.outputs[0].token_ids[-1]
    [output] = llm.generate("Hello", SamplingParams(temperature=0, stop_token_ids=[last], max_tokens=12))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", last)


def test_logprobs_are_by_token_id(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5, logprobs=2))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert [sorted(position.values(), key=lambda found: found.rank or 9)[0].rank for position in answer.logprobs] == [
        1
    ] * 5
    chosen = [position[token_id] for position, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert [found.rank for found in chosen] == [1] * 5
    assert answer.cumulative_logprob == pytest.approx(sum(found.logprob for found in chosen))
    assert "".join(found.decoded_token for found in chosen) == answer.text


def test_a_prompts_logprobs_are_those_of_its_tokens(llm: LLM) -> None:
    [generated] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    answer = generated.outputs[0]
    prompt = generated.prompt_token_ids + answer.token_ids
    [scored] = llm.generate(prompt, SamplingParams(max_tokens=1, n=2, prompt_logprobs=2))
    assert scored.prompt_logprobs is not None
    assert (len(scored.prompt_logprobs), scored.prompt_logprobs[0]) == (len(prompt), None)
    assert answer.logprobs is not None
    for position, of_answer in zip(scored.prompt_logprobs[-6:], answer.logprobs, strict=True):
        assert position is not None
        assert position.keys() == of_answer.keys()
        assert all(position[key].rank == of_answer[key].rank for key in position)
        assert all(position[key].logprob == pytest.approx(of_answer[key].logprob, abs=1e-4) for key in position)
    assert generated.prompt_logprobs is None


def test_masks_truncation_and_answers_without_text(llm: LLM) -> None:
    [masked] = llm.generate("Hello", SamplingParams(allowed_token_ids=[50, 51], max_tokens=8))
    assert set(masked.outputs[0].token_ids) <= {50, 51}
    [cut] = llm.generate(
        [5, 6, 7, 8], SamplingParams(truncate_prompt_tokens=2, max_tokens=2, detokenize=False, ignore_eos=True)
    )
    assert cut.prompt_token_ids == [7, 8]
    assert (cut.outputs[0].text, len(cut.outputs[0].token_ids)) == ("", 2)


def test_a_repeated_prompt_is_found_in_the_prefix_cache(llm: LLM) -> None:
    prompt = list(range(5, 45))
    llm.generate(prompt, GREEDY)
    [again] = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens >= 32


def test_several_answers_to_a_prompt_begin_with_the_one_it_gets_alone(llm: LLM) -> None:
    prompts = [list(range(7, 45)), "Hello", "The"]
    params = [SamplingParams(n=n, seed=3, temperature=1, max_tokens=12, stop=".") for n in (5, 1, 128)]
    outputs = llm.generate(prompts, params)
    assert [[answer.index for answer in output.outputs] for output in outputs] == [list(range(n)) for n in (5, 1, 128)]
    assert len({tuple(answer.token_ids) for answer in outputs[0].outputs}) > 1
    for output, prompt in zip(outputs, prompts, strict=True):
        [alone] = llm.generate(prompt, SamplingParams(seed=3, temperature=1, max_tokens=12, stop="."))
        assert output.outputs[0] == alone.outputs[0]
    assert attempts(llm) == 0


def test_the_samples_of_a_prompt_share_its_blocks(llm: LLM) -> None:
    node: Any = llm._engine._node  # type: ignore[attr-defined]
    before = node.core.scheduler.prefix_hits
    llm.generate(list(range(100, 180)), SamplingParams(n=4, max_tokens=2))
    assert node.core.scheduler.prefix_hits - before >= 3 * 64


def test_more_samples_than_the_engine_accepts_at_once_wait(llm: LLM) -> None:
    outputs = llm.generate(["a"] * 20, SamplingParams(n=100, max_tokens=1))
    assert {len(output.outputs) for output in outputs} == {100}


def test_one_wrong_prompt_is_refused_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._engine, "run", lambda jobs: pytest.fail("something ran"))
    with pytest.raises(BadRequest, match="prompt 1: "):
        llm.generate(["fine", {"prompt_token_ids": []}])


def test_an_interrupt_ends_all_requests_and_later_calls_work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    long = SamplingParams(max_tokens=1500, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(kvrelay.offline.llm, "completion_output", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=1), long, long])
    end_s = time.monotonic() + 30
    while attempts(llm):
        assert time.monotonic() < end_s
    assert len(llm.generate("Hello", GREEDY)[0].outputs[0].token_ids) == 12


def test_a_crash_of_the_engine_is_an_error_of_every_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> bool:
        raise RuntimeError("bug")

    with LLM(kv_memory_gb=0.01) as llm:
        node: Any = llm._engine._node  # type: ignore[attr-defined]
        monkeypatch.setattr(node.core, "step", crash)
        for _ in range(2):
            with pytest.raises(KvRelayError, match="the engine crashed: bug"):
                llm.generate("Hello")


def test_closing_ends_a_call_on_another_thread() -> None:
    llm = LLM(kv_memory_gb=0.01)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, ["a"] * 200, SamplingParams(max_tokens=500, ignore_eos=True))
        end_s = time.monotonic() + 30
        while not attempts(llm):
            assert time.monotonic() < end_s
        llm.close()
        with pytest.raises(KvRelayError, match="closed during this call"):
            call.result(30)


def test_nothing_listens_or_connects(llm: LLM) -> None:
    llm.generate("Hello", GREEDY)
    assert not connections


def open_packed_weights() -> list[str]:
    """Files of packed weights that this process keeps open."""
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [target for link in links if link.is_symlink() and (target := os.readlink(link)).endswith("/in-use")]


def test_a_closed_or_failed_llm_leaves_its_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_PACKED_CACHE_GB", "1")
    monkeypatch.setattr("common.model.packed_weights.weights_folder", lambda: tmp_path)
    before = len(open_packed_weights())  # of other tests of this process
    llm = LLM(kv_memory_gb=0.01)
    during = len(open_packed_weights()) - before
    llm.close()
    with pytest.raises(ConfigError, match="max_model_len 2000 needs more"):
        LLM(kv_blocks=4, max_model_len=2000)
    with pytest.raises(ConfigError, match="KV blocks of"):
        LLM(kv_memory_gb=1e-6)
    assert (during, len(open_packed_weights()) - before) == (0 if find_native() is None else 1, 0)


def test_a_closed_llm_says_so_and_has_freed_its_model() -> None:
    """The weights and the KV stayed in memory as long as anything referred to the LLM, and then until a collection."""
    llm = LLM(kv_memory_gb=0.01)
    node: Any = llm._engine._node  # type: ignore[attr-defined]
    worker = weakref.ref(node._leader.worker)
    del node
    llm.close()
    llm.close()
    assert worker() is None
    with pytest.raises(BadRequest, match="closed"):
        llm.generate("Hello")


def test_an_interrupted_start_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was loaded all the same, and stayed in memory with a thread that nothing could end."""
    may_start = threading.Event()
    start = LocalNode._start

    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise KeyboardInterrupt

    def late_start(node: LocalNode, *args: Any) -> None:
        assert may_start.wait(10)
        start(node, *args)

    monkeypatch.setattr(LocalNode, "_start", late_start)
    monkeypatch.setattr(kvrelay.offline.run_async, "Future", Interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        LLM(kv_memory_gb=0.01)
    may_start.set()
    end_s = time.monotonic() + 60
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end_s


FORKED = """
import os, sys
from kvrelay import LLM, BadRequest, SamplingParams

llm = LLM(kv_memory_gb=0.01)
if (child := os.fork()) == 0:
    try:
        llm.generate("Hello")
    except BadRequest as error:
        sys.exit(42 if "before a fork" in str(error) else 1)
os.write(1, b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_neither_waits_for_the_engine_nor_closes_it() -> None:
    """It waited for ever for threads that a fork does not have, and its end stopped the cluster of its parent."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("42", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_block": 4}, "did you mean 'kv_blocks'"),
        ({"port": 8000}, "no option 'port'"),
        ({"tensor_parallel_size": 2}, "one process runs one rank"),
        ({"dtype": "float99"}, "dtype"),
        ({"decode": 1, "pid_file": "x"}, "no option 'pid_file'"),
        ({"decode": 1, "prefil_tp": 2}, "did you mean 'prefill_tp'"),
        ({"chat_template": "/nowhere/template"}, "cannot read the chat template"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_options_may_be_python_lists_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(kv_memory_gb=0.01, dtype=torch.float32, served_model_name=["a", "b"]) as llm:
        engine: Any = llm._engine  # pyright: ignore[reportPrivateUsage]
        assert engine.model.name == "a"
    started: list[str] = []

    def start(config: UpConfig, arguments: list[str]) -> SimpleNamespace:
        started.extend(arguments)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("kvrelay.offline.cluster_engine.ClusterEngine", start)
    with LLM(decode=1, served_model_name=["a", "b"], lora=("c=/x",)):
        options = dict(zip(started[::2], started[1::2], strict=True))
    assert (options["--served-model-name"], options["--lora"]) == ('["a", "b"]', '["c=/x"]')


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_offered_tools_are_checked_as_over_http(llm: LLM) -> None:
    question = [{"role": "user", "content": "What time is it?"}]
    with pytest.raises(BadRequest, match="conversation 0: tools"):
        llm.chat(question, tools=[{"type": "function"}])


def test_structured_outputs_give_the_answer_its_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=1, structured_outputs={"choice": ["Paris", "Rome"]})
    [output] = llm.generate("The capital of France is", params)
    assert output.outputs[0].text in ("Paris", "Rome")
    assert output.outputs[0].finish_reason == "stop"


def test_grammars_are_checked_within_an_asyncio_loop(llm: LLM) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "additionalProperties": False}}

    async def ask() -> None:
        [output] = llm.generate("a", SamplingParams(structured_outputs={"choice": ["Paris", "Rome"]}, max_tokens=20))
        assert output.outputs[0].text in ("Paris", "Rome")
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, tools=[{"type": "function", "function": function}])
        with pytest.raises(BadRequest, match="prompt 0"):
            llm.generate("a", SamplingParams(structured_outputs={"regex": "("}))

    asyncio.run(ask())
