"""What a call's response shape must be able to do, so that one driver (`router.http.answer`) serves every call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.base.errors import KvRelayError
from router.http.json_body import Json, RawJson
from router.requests.beam_search import BeamOptions
from router.requests.generation import Generation
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class FormatOptions:
    """The response options that the client chose."""

    request_id: str
    model: str
    with_logprobs: bool = False
    with_token_ids: bool = False
    with_prompt_logprobs: bool = False
    echo: bool = False
    """The answer begins with the prompt: its text, and its log-probabilities if `with_logprobs`."""
    whole_vocabulary: bool = False
    """Log-probabilities are those of all tokens: formatting takes long, and is done on a thread."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens `token_id:N`."""
    skip_special_tokens: bool = True
    usage_in_stream: bool = False
    continuous_usage: bool = False
    samples: int = 1
    """Generations of each prompt; they follow each other."""
    returned: int = 1
    """How many of them are choices of the answer."""
    beams: BeamOptions | None = None
    """Choices are the beams of a beam search."""
    token_limit: int | None = None
    """The client's limit on generated tokens; the context may have room for fewer."""
    created: int = 0
    """Unix time in seconds."""


class Format:
    """The response shape of one call, for one request: it may keep state between the chunks of its choices."""

    text_only = False
    """Whether `text_event` serves for all chunks except the opening and closing ones."""
    done = b""
    """The last bytes of every stream."""
    media_type = b"text/event-stream; charset=utf-8"
    """Content type of the stream."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer) -> None:
        self.options = options
        self.tokenizer = tokenizer

    def opening(self, generation: Generation, index: int) -> Iterable[Json]:
        """The stream's first chunks for this choice, before its text. Each is made in bounded time."""
        raise NotImplementedError

    def delta(self, delta: Delta, index: int) -> list[Json]:
        """The chunks for some new tokens; none if there is nothing to show."""
        raise NotImplementedError

    def text_event(self, text: str, index: int) -> bytes:
        """The framed chunk of `delta` for a client that gets only text; built without the chunk's dict."""
        raise NotImplementedError

    def closing(self, generation: Generation, index: int, last: Delta) -> list[Json]:
        """The choice's last chunks. `last`: the new tokens that came with its end."""
        raise NotImplementedError

    def ending(self, generations: Sequence[Generation]) -> list[Json]:
        """The stream's last chunks, after those of all choices."""
        return []

    def failure(self, error: KvRelayError, generation: Generation) -> Json:
        """The chunk that ends a stream with an error."""
        raise NotImplementedError

    def ping(self) -> bytes:
        """What a stream sends that has nothing to say, which clients ignore: a comment."""
        return b": ping\n\n"

    def frame(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""
        raise NotImplementedError

    def logprobs(self, deltas: Sequence[Delta], index: int) -> Json:
        """The log-probabilities of these tokens, which must follow those of the last call."""
        raise NotImplementedError

    def echoed_logprobs(self, generation: Generation, index: int) -> Iterable[Json]:
        """What goes before `logprobs` for a choice that begins with the prompt, in portions; none for others."""
        return ()

    def prompt_logprobs(self, generation: Generation) -> Iterable[list[Json | RawJson | None]]:
        """The `prompt_logprobs` list of a generation, in portions."""
        raise NotImplementedError

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        """The non-streamed response, with null in place of log-probabilities: there can be millions, and `router.http.answer`
        inserts them."""
        raise NotImplementedError
