"""The request fields that both completion calls share, with their limits.

Pure. Bodies are bounded and checked before any tokenization. Every field that reaches the wire protocol is validated here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from common.control.messages import WHOLE_VOCABULARY
from router.http.body_model import BodyModel
from router.http.openai.checks import (
    MAX_CONTENT_PARTS,
    MAX_INT,
    FieldsError,
    TokenId,
    as_object,
    at_most,
    items,
    shorten,
)
from router.http.openai.structured_fields import StructuredFields
from router.requests.beam_search import BeamOptions

MAX_STOPS = 64
"""OpenAI allows 4; every stop string costs time at every token."""
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
NumLogprobs = Annotated[int, Field(ge=-1, le=1024)]
"""How many most likely tokens; -1: all. The router's option bounds it (`router.http.logprob_bounds`)."""
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 262_144
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_SAMPLES = 128
MAX_BEAMS = 16
_WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    "repetition_penalty": (1,),
    **dict.fromkeys(("stream", "best_of", "allowed_token_ids"), (False,)),
    **dict.fromkeys(("stop", "logit_bias", "bad_words", "logprob_token_ids", "prediction"), ([], {})),
}
"""Fields that no beam search can follow, and their values that ask for nothing."""
MAX_REQUEST_ID = 256
MAX_PRIORITY = 1000
"""Allowed range: -MAX_PRIORITY to MAX_PRIORITY."""


def _check_truncation(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 or at least 1")
    return value


TruncateTokens = Annotated[int, Field(ge=-1, le=MAX_INT), AfterValidator(_check_truncation)]
"""Longer prompts are cut to this many tokens; -1: to what the model takes."""


class StreamOptions(BodyModel):
    """What a stream contains in addition to the answer."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class PredictionPart(BodyModel):
    """One part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(BodyModel):
    """What the answer will mostly be, such as a file that is to be edited. It makes the answer faster, and changes none of it."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[PredictionPart], Field(max_length=MAX_CONTENT_PARTS)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


class CompletionRequestBase(StructuredFields):
    """Fields that both calls share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: list[str] = Field(default_factory=lambda: [])
    stop_token_ids: Annotated[list[TokenId], at_most(MAX_STOP_TOKEN_IDS, "token ids")] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    allowed_token_ids: Annotated[list[int], Field(min_length=1), at_most(MAX_ALLOWED_TOKEN_IDS, "token ids")] | None = (
        None
    )
    """Only these can be generated."""
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            at_most(MAX_BAD_WORDS, "bad words"),
        ]
        | None
    ) = None
    """Texts that must not be generated, as tokenized with and without a space before them."""
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = 0
    logprob_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROBS)] | None = None
    """Log-probabilities of these tokens at each position, instead of those of the most likely ones."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = 1
    """Answers to each prompt."""
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    """Answers to compute for each prompt; the `n` most likely ones are returned."""
    use_beam_search: bool | None = False
    """The answers are the `n` most likely sequences of tokens that a beam search finds."""
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = 1.0
    """Beams are compared by their log-probability over their length, prompt included, to this power."""
    prompt_logprobs: NumLogprobs | None = None
    """Log-probabilities of each prompt token after the first, and of that many most likely ones."""
    truncate_prompt_tokens: TruncateTokens | None = None
    """Keep only the last tokens of the prompt; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """"right": keep the first tokens instead."""
    echo: bool | None = False
    """Begin the answer with the prompt's text (chat: with that of the last message, if the assistant's)."""
    detokenize: bool | None = True
    """False: the answer has token ids instead of text."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens `token_id:N`; by default as the router's option says."""
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Lower is served earlier."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID)] | None = None
    """The client's own id of the request. It is echoed, never used as a key."""

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _check_stop(cls, value: Any) -> list[str]:
        stops = [] if value is None else [value] if isinstance(value, str) else items(value)
        if stops is None or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, value: Any) -> Any:
        biases = as_object(value) or {}
        if len(biases) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} biases are allowed")
        wrong = next((key for key in biases if not (key.isascii() and key.isdecimal() and len(key) <= 10)), None)
        if wrong is not None:
            raise ValueError(f"the keys must be token ids, as decimal numbers; {shorten(wrong)} is not")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequestBase:
        given = vars(self)  # quicker to read than attributes
        stream, n, best_of = given["stream"], given["n"] or 1, given["best_of"]
        if given["stream_options"] is not None and not stream:
            raise FieldsError("stream_options", "stream_options is only allowed with stream=true")
        if given["prompt_logprobs"] is not None and stream:
            raise FieldsError(
                "prompt_logprobs", "prompt_logprobs is not allowed with stream=true; echo with logprobs is"
            )
        if given["use_beam_search"]:
            self._check_beams(n)
        elif given["length_penalty"] not in (None, 1.0):
            raise FieldsError("length_penalty", "length_penalty is only allowed with use_beam_search=true")
        if given["detokenize"] is False and given["stop"]:
            raise FieldsError("stop", "stop strings need detokenize=true; stop_token_ids do not")
        if best_of is not None and best_of < n:
            raise FieldsError("best_of", f"best_of is {best_of}, less than n, which is {n}")
        if stream and (best_of or n) > n:
            raise FieldsError(
                "best_of", "best_of above n is not allowed with stream=true: the best answers are known at the end"
            )
        return self

    def _check_beams(self, width: int) -> None:
        """A beam search compares the model's own probabilities, of whole tokens, and knows its answers at the end."""
        given = vars(self)
        if width > MAX_BEAMS:
            raise FieldsError("n", f"a beam search has at most {MAX_BEAMS} beams (n)")
        for name, neutral in _WITHOUT_BEAMS.items():
            if given[name] is not None and given[name] not in neutral:
                raise FieldsError(name, f"{name} is not allowed with use_beam_search=true")
        if self.num_logprobs == WHOLE_VOCABULARY:
            raise FieldsError(
                "logprobs", "log-probabilities of the whole vocabulary are not given with use_beam_search=true"
            )

    @property
    def beams(self) -> BeamOptions | None:
        """How to search beams; None: the answers are sampled."""
        given = vars(self)
        if not given["use_beam_search"]:
            return None
        return BeamOptions(given["n"] or 1, 1.0 if given["length_penalty"] is None else given["length_penalty"])

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token with log-probabilities; None: no log-probabilities."""
        return None if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def num_samples(self) -> int:
        """Answers to compute for each prompt."""
        return self.best_of or self.n or 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """The client's limit on generated tokens."""
        return self.max_tokens

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and (
            bool(self.stream_options.include_usage and self.stream_options.continuous_usage_stats)
        )
