"""The engine of a whole local cluster: `kvrelay up` in processes of its own, asked over HTTP with token ids."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from common.base.errors import KvRelayError, from_code
from common.config.service_configs import UpConfig
from common.control.messages import (
    WHOLE_VOCABULARY,
    AttemptKey,
    FinishReason,
    PromptLogprobs,
    TokenChunk,
    TokenLogprobs,
)
from kvrelay.api_client import ApiAnswer, ApiClient, run_workers
from kvrelay.local_cluster import LocalCluster, own_key
from kvrelay.offline.answer_text import AnswerInProgress
from kvrelay.offline.engine import CLOSED, load_options
from kvrelay.offline.outputs import EngineAnswer
from kvrelay.offline.prompts import PromptJob
from kvrelay.offline.run_async import run_async
from router.http.openai.logprobs import LOWEST
from router.models import served_model
from router.text.detokenizer import TokenPieces

_MOST_IN_FLIGHT = 128
"""Below the router's default limit of waiting requests."""
_ATTEMPTS = 20
_POLL_S = 1.0
"""Time between checks, in a call that waits, whether the cluster is alive."""

_News = tuple[int, list[EngineAnswer]] | BaseException | None
"""The answers to a job with its index, an error, or None at the end."""


class ClusterEngine:
    """A local cluster and its client."""

    def __init__(self, config: UpConfig, arguments: Sequence[str]) -> None:
        """Start the cluster. `arguments`: those of `kvrelay up` that `config` was made from.

        Raises: ConfigError, ClusterFailed.
        """
        self._config = config
        self._is_closed = False
        # Read before anything is started, so that errors of the model folder are reported first.
        options = load_options(config)
        served = served_model.load(config.model, None, options)
        self._cluster = LocalCluster(arguments)
        try:
            card = run_async(self._model_card())
            limits = {"max_model_len": int(card["max_model_len"]), "vocab_size": int(card["vocab_size"])}
            self.model = replace(served, name=str(card["id"]), **limits)
        except BaseException:
            self._cluster.close()
            raise

    def _client(self) -> ApiClient:
        config, url = self._config, self._cluster.url
        timeout_s = config.request_timeout_s
        key = own_key(config.api_key)
        return ApiClient(url, key, connections=_MOST_IN_FLIGHT, timeout_s=timeout_s, attempts=_ATTEMPTS)

    async def _model_card(self) -> dict[str, Any]:
        async with self._client() as client:
            answer = await client.get("/v1/models")
        if answer.status_code != 200:  # a file of API keys does not say which one to send
            error: dict[str, Any] = answer.body.get("error") or {}
            raise KvRelayError(f"the local cluster refuses its own client: {error.get('message')}")
        return answer.body["data"][0]

    def run(self, jobs: Sequence[PromptJob]) -> Generator[tuple[int, list[EngineAnswer]]]:
        news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        work = loop.create_task(self._run_all(jobs, news))

        def run_loop() -> None:
            try:
                loop.run_until_complete(work)
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                news.put(error)
            finally:
                news.put(None)
                loop.close()

        thread = threading.Thread(target=run_loop, name="requests", daemon=True)
        thread.start()
        try:
            while (item := self._next_of(news)) is not None:
                yield item
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and been closed
                loop.call_soon_threadsafe(work.cancel)
            thread.join()

    def _next_of(self, news: queue.SimpleQueue[_News]) -> tuple[int, list[EngineAnswer]] | None:
        """Wait for the next answers, None at the end. Raises: KvRelayError, also if the cluster ends or is closed."""
        while True:
            error: BaseException | None = None
            with contextlib.suppress(queue.Empty):
                item = news.get(timeout=_POLL_S)
                if not isinstance(item, BaseException):
                    return item
                error = item
            if self._is_closed:
                raise KvRelayError(CLOSED)
            if not self._cluster.is_alive:
                raise self._cluster.failure()
            if error is not None:
                raise error

    async def _run_all(self, jobs: Sequence[PromptJob], news: queue.SimpleQueue[_News]) -> None:
        async with self._client() as client:

            async def send(item: tuple[int, PromptJob]) -> None:
                index, job = item
                path = "/v1/completions" if job.chat is None else "/v1/chat/completions"
                answer = await client.post(path, request_body(job, self.model.name))
                news.put((index, to_answers(index, job, answer, self.model.tokenizer.pieces)))

            samples = max((job.params.n for job in jobs), default=1)
            await run_workers(enumerate(jobs), send, max(1, min(len(jobs), _MOST_IN_FLIGHT // samples)))

    def close(self) -> None:
        self._is_closed = True
        self._cluster.close()


def request_body(job: PromptJob, model: str) -> dict[str, Any]:
    """The body of `/v1/completions`, for a conversation of `/v1/chat/completions`, that has the same answer as the job in one
    process.
    """
    engine = job.request.engine
    if job.chat is None:
        fields = {**job.params.completion_fields(), "prompt": engine.prompt_ids.tolist()}
        fields.pop("truncate_prompt_tokens", None)  # the prompt's ids are those that are left
    else:  # not as a prompt: tools and reasoning change what a grammar allows
        fields = {**job.chat, **job.params.chat_fields()}
    return {
        **fields,
        "seed": engine.sampling.seed,
        "max_tokens": engine.sampling.max_tokens,
        "model": model,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def to_answers(index: int, job: PromptJob, answer: ApiAnswer, pieces: TokenPieces) -> list[EngineAnswer]:
    """The answers in a response. Raises: KvRelayError, the server's error."""
    body = answer.body
    if answer.status_code != 200:
        error: dict[str, Any] = body.get("error") or {}
        raise from_code(str(error.get("code")), f"prompt {index}: {error.get('message')}")
    cached = int(body["usage"]["prompt_tokens_details"]["cached_tokens"]) if job.params.n == 1 else None
    count = _most(job.params.logprobs)
    answers: list[EngineAnswer] = []
    for choice in sorted(body["choices"], key=lambda choice: choice["index"]):
        shown = choice["logprobs"]
        finish_reason, prompt_logprobs = choice["finish_reason"], choice.get("prompt_logprobs")
        if job.chat is None:
            logprobs = None if shown is None else _logprobs(shown, count)
            text = choice["text"]
        else:
            logprobs = None if shown is None else _chat_logprobs(shown, count)
            finish_reason = "stop" if finish_reason == "tool_calls" else finish_reason
            text = _text(job, choice["token_ids"], finish_reason, pieces)
            prompt_logprobs = body.get("prompt_logprobs") if choice["index"] == 0 else None
        found = _prompt_logprobs(prompt_logprobs, _most(job.params.prompt_logprobs))
        answers.append(
            EngineAnswer(text, choice["token_ids"], logprobs, finish_reason, choice["stop_reason"], cached, found)
        )
    return answers


def _text(job: PromptJob, token_ids: list[int], finish_reason: FinishReason, pieces: TokenPieces) -> str:
    """The text of an answer to a conversation, with the calls and the reasoning that the response has apart."""
    progress = AnswerInProgress(job.request, pieces)
    progress.push(TokenChunk(AttemptKey("offline", 1), 0, token_ids, [], finish_reason))
    assert progress.answer is not None
    return progress.answer.text


def _logprobs(shown: dict[str, Any], count: int | None) -> list[TokenLogprobs]:
    """Log-probabilities from those of `/v1/completions`, whose tokens are `token_id:N`: the `count` most likely ones, then
    the sampled one if it is not among them."""
    found: list[TokenLogprobs] = []
    for logprob, by_name in zip(shown["token_logprobs"], shown["top_logprobs"], strict=True):
        top = list(by_name.items())[:count]
        ids = [int(name.removeprefix("token_id:")) for name, _ in top]
        found.append(TokenLogprobs(_number(logprob), ids, [_number(each) for _, each in top]))
    return found


def _chat_logprobs(shown: dict[str, Any], count: int | None) -> list[TokenLogprobs]:
    """Log-probabilities from those of `/v1/chat/completions`, in the order of `_logprobs`."""
    found: list[TokenLogprobs] = []
    for entry in shown["content"]:
        top = entry["top_logprobs"][:count]
        ids = [int(each["token"].removeprefix("token_id:")) for each in top]
        found.append(TokenLogprobs(_number(entry["logprob"]), ids, [_number(each["logprob"]) for each in top]))
    return found


def _prompt_logprobs(shown: list[dict[str, Any] | None] | None, count: int | None) -> list[PromptLogprobs] | None:
    """Log-probabilities of the prompt's tokens after the first; each entry begins with the prompt's own token."""
    if shown is None:
        return None
    found: list[PromptLogprobs] = []
    for entry in filter(None, shown):
        own = next(iter(entry.values()))
        top = sorted(entry.items(), key=lambda item: item[1]["rank"])[:count]
        ids = [int(token_id) for token_id, _ in top]
        found.append(
            PromptLogprobs(_number(own["logprob"]), own["rank"], ids, [_number(each["logprob"]) for _, each in top])
        )
    return found


def _most(count: int | None) -> int | None:
    """How many most likely tokens; None: all."""
    return None if count == WHOLE_VOCABULARY else count or 0


def _number(logprob: float) -> float:
    return logprob if logprob > LOWEST else -math.inf
