from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common.base.errors import EngineError
from common.config.service_configs import UpConfig
from common.control.messages import TokenLogprobs
from kvrelay import BadRequest, KvRelayError, SamplingParams
from kvrelay.api_client import ApiAnswer, ApiClient
from kvrelay.local_cluster import ClusterFailed
from kvrelay.offline import cluster_engine
from kvrelay.offline.cluster_engine import ClusterEngine, request_body, to_answers
from kvrelay.offline.prompts import PromptJob, chat_jobs, generate_jobs
from router.models import served_model

MODEL = served_model.load("demo", None, served_model.LoadOptions())
PIECES = MODEL.tokenizer.pieces


def job(params: SamplingParams) -> PromptJob:
    return generate_jobs(MODEL, [[5, 6, 7]], params)[0]


def test_the_body_fixes_everything_that_a_server_would_choose() -> None:
    made = job(SamplingParams(max_tokens=None, stop="x", ignore_eos=True))
    body = request_body(made, "demo")
    assert body["prompt"] == [5, 6, 7]
    assert body["seed"] == made.request.engine.sampling.seed
    assert body["max_tokens"] == made.request.engine.sampling.max_tokens > 1000
    assert (body["stop"], body["ignore_eos"], body["return_token_ids"]) == ("x", True, True)
    assert "temperature" not in body


def test_answers_are_read_from_the_response_in_their_order() -> None:
    choice = {
        "index": 0,
        "logprobs": None,
        "text": "hi",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "stop_reason": "x",
    }
    body = {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}
    [answer] = to_answers(0, job(SamplingParams()), ApiAnswer(200, "", body), PIECES)
    assert answer == ("hi", [1, 2], None, "stop", "x", 16, None)
    body["choices"] = [{**choice, "index": 1, "text": "second"}, choice]
    two = to_answers(0, job(SamplingParams(n=2)), ApiAnswer(200, "", body), PIECES)
    assert [(answer.text, answer.cached_tokens) for answer in two] == [("hi", None), ("second", None)]


def test_a_conversation_is_sent_as_one_and_calls_stay_in_its_text() -> None:
    """It was sent as a prompt: tools and reasoning were not known where its form was given, and markers of calls that are
    special tokens were not in the text."""
    form = {"choice": ["red"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    question = [{"role": "user", "content": "Hello"}]
    [made] = chat_jobs(MODEL, question, SamplingParams(logprobs=1, structured_outputs=form), {"tools": [tool]})
    body = request_body(made, "demo")
    assert (body["messages"], body["tools"], body["logprobs"], body["top_logprobs"]) == (question, [tool], True, 1)
    assert body["structured_outputs"] == form
    assert "prompt" not in body
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = [*MODEL.tokenizer.encode(text, add_special_tokens=False), MODEL.tokenizer.eos_token_id]
    shown = [
        {"token": f"token_id:{i}", "logprob": -1.0, "top_logprobs": [{"token": "token_id:3", "logprob": -9999.0}]}
        for i in ids
    ]
    answered = {
        "choices": [
            {
                "index": 0,
                "message": {"content": None},
                "token_ids": ids,
                "finish_reason": "tool_calls",
                "stop_reason": None,
                "logprobs": {"content": shown},
            }
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
        "prompt_logprobs": None,
    }
    [answer] = to_answers(0, made, ApiAnswer(200, "", answered), PIECES)
    assert (answer.text, answer.token_ids, answer.finish_reason) == (text, ids, "stop")
    assert answer.logprobs == [TokenLogprobs(-1.0, [3], [-math.inf])] * len(ids)


@pytest.mark.parametrize(("code", "kind"), [("invalid_request", BadRequest), ("engine_error", EngineError)])
def test_an_error_of_the_server_keeps_its_kind(code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="prompt 3: no"):
        to_answers(3, job(SamplingParams()), ApiAnswer(400, "", {"error": {"code": code, "message": "no"}}), PIECES)


class FakeCluster:
    """A cluster whose end a test decides."""

    url = "http://cluster"
    is_alive = True

    def __init__(self, arguments: Sequence[str]) -> None:
        pass

    def failure(self) -> KvRelayError:
        return ClusterFailed("the local cluster ended: killed")

    def close(self) -> None:
        self.is_alive = False


class SilentClient(ApiClient):
    """A client of a server that has a model, and answers nothing else."""

    asked = threading.Event()

    async def get(self, path: str) -> ApiAnswer:
        return ApiAnswer(200, "", {"data": [{"id": "demo", "max_model_len": 64, "vocab_size": 1000}]})

    async def post(self, path: str, body: Mapping[str, Any]) -> ApiAnswer:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ClusterEngine:
    monkeypatch.setattr(cluster_engine, "LocalCluster", FakeCluster)
    monkeypatch.setattr(cluster_engine, "ApiClient", SilentClient)
    monkeypatch.setattr(SilentClient, "asked", threading.Event())
    return ClusterEngine(UpConfig(), [])


def test_a_cluster_starts_within_an_asyncio_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_engine, "LocalCluster", FakeCluster)
    monkeypatch.setattr(cluster_engine, "ApiClient", SilentClient)

    async def start() -> ClusterEngine:
        return ClusterEngine(UpConfig(), [])

    assert asyncio.run(start()).model.max_model_len == 64


class ClientWithKey(SilentClient):
    """A client of a server that wants the key `one`."""

    def __init__(self, url: str, api_key: str, **options: Any) -> None:
        super().__init__(url, api_key, **options)
        self._key = api_key

    async def get(self, path: str) -> ApiAnswer:
        if self._key != "one":
            return ApiAnswer(401, "", {"error": {"message": "a valid API key is needed"}})
        return await super().get(path)


def test_the_cluster_gets_one_of_its_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It got all of them as one key, was refused, and ended with a KeyError."""
    monkeypatch.setattr(cluster_engine, "LocalCluster", FakeCluster)
    monkeypatch.setattr(cluster_engine, "ApiClient", ClientWithKey)
    assert ClusterEngine(UpConfig(api_key="one, two"), []).model.name == "demo"
    with pytest.raises(KvRelayError, match="a valid API key is needed"):
        ClusterEngine(UpConfig(api_key_file="keys.toml"), [])


def error_of_call(engine: ClusterEngine, end: Callable[[], None]) -> BaseException | None:
    """What a call raises during which `end` runs."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: list(engine.run([job(SamplingParams())])))
        assert SilentClient.asked.wait(10)
        end()
        return call.exception(10)


def test_a_cluster_that_dies_ends_the_call(engine: ClusterEngine) -> None:
    cluster: Any = engine._cluster  # pyright: ignore[reportPrivateUsage]
    error = error_of_call(engine, cluster.close)
    assert isinstance(error, ClusterFailed)


def test_closing_the_engine_ends_the_call(engine: ClusterEngine) -> None:
    assert "closed during this call" in str(error_of_call(engine, engine.close))


class QuickClient(SilentClient):
    """A client whose every request is answered at once."""

    async def post(self, path: str, body: Mapping[str, Any]) -> ApiAnswer:
        choice = {
            "index": 0,
            "logprobs": None,
            "text": "hi",
            "token_ids": [1],
            "finish_reason": "stop",
            "stop_reason": None,
        }
        return ApiAnswer(200, "", {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}})


def test_a_call_ends_well_although_its_loop_was_closed_before_its_thread_ended(
    engine: ClusterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised that the event loop is closed, and the answers were lost."""

    class LoopClosedEarly(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:
            while not self.is_closed():
                time.sleep(0.001)
            return super().call_soon_threadsafe(*args, **options)

    monkeypatch.setattr(cluster_engine, "ApiClient", QuickClient)
    monkeypatch.setattr(cluster_engine.asyncio, "new_event_loop", LoopClosedEarly)
    assert [index for index, _ in engine.run([job(SamplingParams())])] == [0]
