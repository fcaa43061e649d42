"""From the tokens of one request to its answer: text, stop strings, log-probabilities. Pure."""

from __future__ import annotations

from common.control.messages import FinishReason, PromptLogprobs, TokenChunk, TokenLogprobs
from kvrelay.offline.outputs import EngineAnswer
from router.requests.generation import text_of
from router.requests.request import GenerationRequest
from router.text.detokenizer import TokenPieces


class AnswerInProgress:
    """The tokens of one request so far. Invariant: `answer` is set by the chunk that ends it."""

    def __init__(self, request: GenerationRequest, pieces: TokenPieces) -> None:
        self.answer: EngineAnswer | None = None
        self._request = request
        self._text = text_of(request, pieces)
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.engine.sampling.logprobs is None else []
        self._prompt_logprobs: list[PromptLogprobs] | None = (
            None if request.engine.sampling.prompt_logprobs is None else []
        )
        self._cached_tokens = 0

    def push(self, chunk: TokenChunk) -> bool:
        """Take the next tokens, or log-probabilities of the prompt's. Returns whether a stop string ended the answer before
        the engine did."""
        if chunk.prompt_logprobs is not None:
            self._take_prompt_logprobs(chunk.start, chunk.prompt_logprobs)
            return False
        if chunk.stats is not None:
            self._cached_tokens = chunk.stats.cached_tokens
        stop_ids = self._request.engine.sampling.stop_token_ids
        by_token = chunk.finish_reason == "stop" and chunk.token_ids[-1] in stop_ids
        delta = self._text.push(chunk.token_ids, ended_by_token=by_token)
        self._parts.append(delta.text)
        self._token_ids += chunk.token_ids[: delta.consumed]
        if self._logprobs is not None:
            self._logprobs += (chunk.logprobs or [])[: delta.consumed]
        if delta.stop is not None:
            self._end("stop", delta.stop)
            return chunk.finish_reason is None
        if chunk.finish_reason is not None:
            self._parts.append(self._text.flush())
            last = self._token_ids[-1]
            self._end(chunk.finish_reason, last if by_token and last in self._request.client_stop_ids else None)
        return False

    def _take_prompt_logprobs(self, start: int, part: list[PromptLogprobs]) -> None:
        """A sequence that was preempted has its prompt computed again, and begins its parts again."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[start:] = part

    def _end(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        text = "".join(self._parts)
        self.answer = EngineAnswer(
            text,
            self._token_ids,
            self._logprobs,
            finish_reason,
            stop_reason,
            self._cached_tokens,
            self._prompt_logprobs,
        )
