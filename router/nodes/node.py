"""One node as this router knows it: registration, link, last load report, and the legs open there. Pure data.

Runs on the router's event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, Protocol

from common.control.messages import AttemptKey, Message, NodeLoad, NodeRecord
from router.policy import Fleet


class NodeLink(Protocol):
    """The part of `common.control.links.Link` that the router uses."""

    def send(self, message: Message) -> None:
        """Raises: Unavailable if the link is closed."""
        ...

    def close(self) -> None: ...

    @property
    def refused(self) -> list[Message]:
        """After `close`: the messages that were not sent because the queue was full."""
        ...


class OpenLeg(NamedTuple):
    """One node's part of an attempt, from its request to its end."""

    order: int
    """Position among all requests sent to this node, from 1."""
    tokens: float
    """Prompt tokens to compute there."""
    blocks: int
    """KV blocks to hold there."""


@dataclass
class Node:
    """One incarnation of a node as this router knows it."""

    record: NodeRecord
    link: NodeLink | None = None
    listed: bool = True
    load: NodeLoad = field(default_factory=NodeLoad)
    last_pong_s: float | None = None
    linked_s: float = 0.0
    stuck: bool = False
    """The node answers, but its engine loop makes no progress."""
    unreachable: bool = False
    """The last link could not be opened: a malformed address, or no free socket in this process."""
    lost: bool = False
    """A loss of this node was reported, and it has not answered since then."""
    legs: dict[AttemptKey, OpenLeg] = field(default_factory=dict[AttemptKey, OpenLeg])
    """Open legs, in the order in which they were sent."""
    relayed_from: dict[str, int] = field(default_factory=dict[str, int])
    """KV bytes that this router's requests relayed to this node, by the incarnation of the prefill node."""
    sent: int = 0
    reported: int = 0
    """The last pong includes the first `reported` of the requests sent."""
    pings: deque[int] = field(default_factory=deque[int])
    """For each unanswered ping, how many requests had been sent before it."""
    owed_aborts: list[AttemptKey] = field(default_factory=list[AttemptKey])
    """Attempts aborted while there was no link; the node might still run them."""

    fleet: Fleet | None = None
    """The fleet that has its row; None while it has none."""

    @property
    def node_id(self) -> str:
        return self.record.peer.node_id

    @cached_property
    def kv_kind(self) -> str:
        """Equal for nodes between which KV can be relayed. The layout of an incarnation never changes."""
        return self.record.layout.kv_kind

    @property
    def pools(self) -> bool:
        """It has a pooling model, and never gets requests to generate."""
        return self.record.model.task != "generate"

    @property
    def incarnation(self) -> str:
        return self.record.peer.incarnation

    @property
    def works(self) -> bool:
        """Listed and connected, and its last answer said that its engine loop runs."""
        return self.listed and self.link is not None and self.last_pong_s is not None and not self.stuck

    @property
    def usable(self) -> bool:
        """It works and is not draining."""
        return self.works and not self.load.draining

    @property
    def unreported(self) -> list[OpenLeg]:
        """Open legs that the last pong cannot include, the latest first."""
        return list(takewhile(lambda leg: leg.order > self.reported, reversed(self.legs.values())))
