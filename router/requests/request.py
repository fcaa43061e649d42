"""Input and output of one generation: its request, its deltas, its outcome. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.base.errors import KvRelayError
from common.control.messages import EngineRequest, FinishReason, TokenLogprobs
from router.requests.queued_request import NOBODY, Tenant
from router.requests.shared_prompt import SharedPrompt


class TraceContext(NamedTuple):
    """W3C headers of a request, as sent; empty if there are none."""

    parent: str = ""
    state: str = ""


@dataclass(slots=True)
class GenerationRequest:
    """The validated input of one generation."""

    engine: EngineRequest
    """The part that is sent to the nodes."""
    stop: tuple[str, ...] = ()
    client_stop_ids: frozenset[int] = frozenset()
    """Stop tokens from the request's `stop_token_ids`; only these are reported as `stop_reason`."""
    include_stop: bool = False
    """Whether the text ends with the stop string, or with the stop token's text."""
    skip_special_tokens: bool = True
    visible_tokens: frozenset[int] = frozenset()
    """Special tokens whose text is needed although special tokens are skipped."""
    grammar_param: str = ""
    """The request's field that `engine.sampling.grammar` comes from."""
    relaxed: tuple[str, ...] = ()
    """Keywords of schemas that the grammar does not enforce."""
    detokenize: bool = True
    """False: there is no text."""
    open_ended: bool = False
    """Nothing limits the answer but the model's context."""
    prompt_only: bool = False
    """No token is wanted: the one that the engine draws is dropped."""
    echo: str = ""
    """Text that the answer begins with."""
    session: str = ""
    """Requests with the same key go to the same nodes under the policy `session`."""
    tenant: Tenant = NOBODY
    """The tenant whose fair share the request counts against in the admission queue."""
    trace: TraceContext | None = None
    """The client's, for the router's spans."""
    shared: SharedPrompt | None = None
    """What it shares with the other samples of its prompt; None if it is the only one."""


@dataclass(slots=True)
class Delta:
    """New tokens and text. `text` can lag behind `token_ids`: incomplete characters and possible stop strings wait."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


@dataclass(slots=True)
class Outcome:
    """How a generation ended: with a finish reason, with an error, or (neither) because the client disconnected."""

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: KvRelayError | None = None


@dataclass(slots=True)
class Served:
    """How the current attempt was served, as far as its legs have reported; the bytes are those of all attempts."""

    prefill_hit_tokens: int | None = None
    decode_hit_tokens: int | None = None
    relayed_bytes: int = 0
