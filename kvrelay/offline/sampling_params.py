"""Sampling parameters of offline requests, with vLLM's names. The checks are those of the HTTP API's bodies. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from common.base.errors import BadRequest
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import RequestT, parse_body


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How answers are sampled. A field that is None has the default of the HTTP API, which for temperature, top_p, top_k,
    min_p and repetition_penalty is that of the model's `generation_config.json`.

    Raises: BadRequest naming the field that is wrong.
    """

    n: int = 1
    """Answers to each prompt."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = 16
    """None: up to the model's default length, or to the end of its context."""
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """None: a random one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    """Only these are generated."""
    bad_words: Sequence[str] | None = None
    """Texts that are not generated."""
    logprobs: int | None = None
    """n: return log-probabilities of the sampled token and of the n most likely ones."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    structured_outputs: Mapping[str, Any] | None = None
    """The form of the answer: one of `json` (a schema), `regex`, `choice`, `grammar`, `json_object`, as in the HTTP API."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt; -1: as many as leave room for the answer."""
    detokenize: bool = True
    """False: answers have token ids only."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens == 0:
            raise BadRequest("max_tokens must be at least 1", param="max_tokens")
        to_request({"prompt": [0], **self.completion_fields()}, CompletionRequest)

    def completion_fields(self) -> dict[str, Any]:
        """The fields of a `/v1/completions` body."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        given["max_tokens"] = self.max_tokens
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return given

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a `/v1/chat/completions` body."""
        given = self.completion_fields()
        if (most_likely := given.pop("logprobs", None)) is not None:
            given |= {"logprobs": True, "top_logprobs": most_likely}
        return given


def to_request(body: Mapping[str, Any], kind: type[RequestT]) -> RequestT:
    """`body` as the HTTP API would read it. Raises: BadRequest naming the first field that is wrong."""
    try:
        data = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"not a JSON value: {error}") from None
    return parse_body(data, kind)
