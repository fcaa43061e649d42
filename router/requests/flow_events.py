"""Events and instructions of the state machines of requests (`placed_request`, `flow`, `pooling.flow`). Pure data.

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
from common.control.pooling import PoolRequest, PoolResult

# ---------------------------------------------------------------- events


class Found(NamedTuple):
    """An answer to `Choose`: these nodes can get the attempt, and it may go to them now.

    `prefill` is None if the decode node computes the prompt itself; `decode` is None for a part of a pooling call.
    """

    prefill: PeerRef | None
    decode: PeerRef | None
    timeout_s: float


class NoNode(NamedTuple):
    """An answer to `Choose`: no node can serve the attempt at `now_s`."""

    error: KvRelayError
    now_s: float
    rejoining: bool
    """This router stalled, and its nodes are about to reconnect."""


class Queued(NamedTuple):
    """An answer to `Choose`: the request waits in the admission queue, until `Ready` or `GiveUp`."""


class SampleAwaited(NamedTuple):
    """An answer to `Choose`: the request waits for the first sample of its prompt, until `Ready`."""


class Ready(NamedTuple):
    """What the request waited for has happened: its turn in the queue, a node's return, the end of a backoff."""


class Chunk(NamedTuple):
    """Tokens from the node with this incarnation."""

    incarnation: str
    chunk: TokenChunk


class Pooled(NamedTuple):
    """Vectors from the node with this incarnation, for a part of a pooling call."""

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
    """The router ends the request: it is refused, a wait or the request itself took too long, or the router stops."""

    error: KvRelayError


class StopFound(NamedTuple):
    """The text of the tokens emitted so far contains a stop string."""


Answer = Found | NoNode | Queued | SampleAwaited | GiveUp
"""To `Choose`."""
Event = Answer | Ready | Chunk | Pooled | LegFailed | NodeLost | ClientGone | StopFound


# ---------------------------------------------------------------- instructions


class Choose(NamedTuple):
    """Choose nodes for the attempt, if possible none whose incarnation is in `avoid`; the `Answer` is the next event."""

    avoid: frozenset[str]
    last: bool = False
    """No other attempt will follow unless this one generates tokens."""
    is_new: bool = False
    """The request must pass the admission queue."""
    begun: bool = False
    """Nodes have worked on the request before, or on a sibling."""


class AwaitNode(NamedTuple):
    """Send `Ready` when a node returns, or `GiveUp` with `error` after `wait_s`."""

    wait_s: float
    error: KvRelayError


class BackOff(NamedTuple):
    """Send `Ready` after `wait_s`."""

    wait_s: float
    why: str


class Admit(NamedTuple):
    """The chosen nodes are about to get the attempt: count it there."""


class Send(NamedTuple):
    """Send to this incarnation. A node that cannot be reached is answered with `NodeLost`."""

    peer: PeerRef
    message: PrefillRequest | DecodeRequest | PoolRequest | Abort


class Release(NamedTuple):
    """The leg `key` at this incarnation is over; it no longer counts as in flight."""

    incarnation: str
    key: AttemptKey


class Emit(NamedTuple):
    """The next tokens for the client."""

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


class FinishPooled(NamedTuple):
    """Terminal: these are the vectors of a pooling part, from the node with this incarnation."""

    incarnation: str
    vectors: list[bytes]


class Fail(NamedTuple):
    """Terminal: the client must be told."""

    error: KvRelayError


class Cancelled(NamedTuple):
    """Terminal: the client has disconnected."""


Terminal = Finish | FinishPooled | Fail | Cancelled
Instruction = (
    Choose | AwaitNode | BackOff | Admit | Send | Release | Emit | EmitPrompt | Report | Blame | Note | Terminal
)
Instructions = list[Instruction]
