"""Events and instructions of a request's state machine (`router.requests.flow`). Pure data.

They are named tuples: a request creates dozens of them, and a frozen dataclass takes three times as long to create.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from common.base.errors import KvRelayError
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    AttemptStats,
    DecodeRequest,
    FinishReason,
    PeerRef,
    PrefillRequest,
    PromptLogprobs,
    Role,
    TokenChunk,
    TokenLogprobs,
)
from common.control.pooling import PoolResult

# ---------------------------------------------------------------- events


class Placed(NamedTuple):
    """The answer to `Place`. `prefill` is None if the decode node computes the prompt itself."""

    prefill: PeerRef | None
    decode: PeerRef
    timeout_s: float


class Unplaceable(NamedTuple):
    """The negative answer to `Place`: no node can serve the attempt."""

    error: KvRelayError


class Chunk(NamedTuple):
    """Tokens from the node with this incarnation."""

    incarnation: str
    chunk: TokenChunk


class Pooled(NamedTuple):
    """Vectors from the node with this incarnation, for a part of a pooling call. No event of `Flow`."""

    incarnation: str
    result: PoolResult


class LegFailed(NamedTuple):
    """The node with this incarnation reported that its leg failed."""

    incarnation: str
    failure: AttemptFailed


class NodeLost(NamedTuple):
    """This incarnation was lost: gone, silent or replaced. Nothing more will come from it."""

    incarnation: str
    reason: str


class ClientGone(NamedTuple):
    """The client has disconnected."""


class GiveUp(NamedTuple):
    """The router ends the request: its deadline has passed, or the router stops."""

    error: KvRelayError


class StopFound(NamedTuple):
    """The text of the tokens emitted so far contains a stop string."""


Event = Placed | Unplaceable | Chunk | LegFailed | NodeLost | ClientGone | GiveUp | StopFound


# ---------------------------------------------------------------- instructions


class Place(NamedTuple):
    """Pick nodes for `attempt`, if possible none whose incarnation is in `avoid`; answer with an event.

    `last`: no other attempt will follow unless this one generates tokens. The attempt is placed after `backoff_s`; with
    `at_once` it is placed immediately unless all available nodes are in `avoid`.
    """

    attempt: int
    num_tokens: int
    """Tokens to prefill: the prompt and those that earlier attempts generated."""
    avoid: frozenset[str]
    last: bool = False
    backoff_s: float = 0.0
    at_once: bool = False


class Send(NamedTuple):
    """Send to this incarnation. A node that cannot be reached is answered with `NodeLost`."""

    peer: PeerRef
    message: PrefillRequest | DecodeRequest | Abort


class Release(NamedTuple):
    """The leg `key` at this incarnation is over; it no longer counts as in flight."""

    incarnation: str
    key: AttemptKey


class Emit(NamedTuple):
    """Tokens for the client; `start` is the index of the first one."""

    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    ended_by_token: bool = False
    """The last token is a stop token."""


class EmitPrompt(NamedTuple):
    """The log-probabilities of all prompt tokens after the first, once in a request's life, before any token."""

    logprobs: list[PromptLogprobs]


class Report(NamedTuple):
    """A leg reported how it served the attempt."""

    role: Role
    stats: AttemptStats
    incarnation: str


class Blame(NamedTuple):
    """This incarnation caused the attempt to end."""

    incarnation: str
    error: KvRelayError


class Note(NamedTuple):
    """For the request's story (`router.requests.story`)."""

    event: str
    reason: str = ""
    data: Mapping[str, object] | None = None


class Finish(NamedTuple):
    """Terminal: the answer is complete."""

    reason: FinishReason


class Fail(NamedTuple):
    """Terminal: the client must be told."""

    error: KvRelayError


class Cancelled(NamedTuple):
    """Terminal: the client has disconnected."""


Instruction = Place | Send | Release | Emit | EmitPrompt | Report | Blame | Note | Finish | Fail | Cancelled
Instructions = list[Instruction]
