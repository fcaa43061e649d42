"""Which prefill node and which decode node serve an attempt. Pure functions over a snapshot.

Runs in the router process, on its event loop, once per attempt. Every decision carries its reason.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.errors import ConfigError, Unavailable

PrefillMode = Literal["relayed", "local"]


@dataclass(frozen=True)
class Candidate:
    """A usable node as the policies see it."""

    node_id: str
    incarnation: str
    kv_kind: str = ""
    """Nodes can relay to each other only if these are equal: what their KV means."""
    waiting: int = 0
    running: int = 0
    in_flight: int = 0
    """Requests that this router sent and the node's last report cannot include."""
    queued_tokens: int = 0
    """Prompt tokens that it accepted and has not computed, unreported ones included."""
    hit_tokens: int = 0
    """Leading tokens of this request whose KV the node is known to hold."""


@dataclass(frozen=True)
class Query:
    """What is to be placed."""

    num_tokens: int
    avoid: frozenset[str] = frozenset()
    """Incarnations to use only if there is nobody else."""
    last: bool = False
    """No other attempt will follow: rather no relay than one from a node to avoid."""


@dataclass(frozen=True)
class Choice:
    """A picked node, and the scores that it was picked by (lower is better), by node id."""

    picked: Candidate
    scores: dict[str, float]


@dataclass(frozen=True)
class Decision:
    """Where an attempt goes and why."""

    policy: str
    mode: PrefillMode
    reason: str
    decode: Choice
    prefill: Choice | None = None

    def explain(self) -> dict[str, object]:
        """The decision as plain data for headers, logs and traces."""
        legs = {"decode": self.decode} if self.prefill is None else {"prefill": self.prefill, "decode": self.decode}
        return {
            "policy": self.policy,
            "mode": self.mode,
            "reason": self.reason,
            **{
                name: {"node": leg.picked.node_id, "hit": leg.picked.hit_tokens, "scores": leg.scores}
                for name, leg in legs.items()
            },
        }

    def to_json(self) -> str:
        """`explain`, compact."""
        return json.dumps(self.explain(), separators=(",", ":"))


@dataclass
class Chooser:
    """What a policy may remember between decisions."""

    turn: int = 0
    rng: random.Random = field(default_factory=random.Random)


Score = Callable[[Candidate, int, int, Chooser], float]
"""(candidate, its index, number of candidates, memory) -> score; the lowest is picked."""


def least_load(candidate: Candidate, index: int, count: int, chooser: Chooser) -> float:
    """The classic data-parallel score: waiting work weighs four times running work."""
    return candidate.waiting * 4 + candidate.running + candidate.in_flight


def round_robin(candidate: Candidate, index: int, count: int, chooser: Chooser) -> float:
    """Distance to whose turn it is."""
    return (index - chooser.turn) % count


def at_random(candidate: Candidate, index: int, count: int, chooser: Chooser) -> float:
    """A fresh random number."""
    return chooser.rng.random()


POLICIES: dict[str, Score] = {"least_load": least_load, "round_robin": round_robin, "random": at_random}


def check_policy(name: str) -> str:
    """`name`, if there is such a policy.

    Raises: ConfigError that lists those there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; known: {', '.join(POLICIES)}")
    return name


def choose(policy: str, candidates: Sequence[Candidate], chooser: Chooser) -> Choice:
    """The best of `candidates` (not empty), by score, then by fewest queued tokens, then in turn."""
    ordered = sorted(candidates, key=lambda candidate: candidate.node_id)
    count = len(ordered)
    score = POLICIES[policy]
    scores = [score(candidate, index, count, chooser) for index, candidate in enumerate(ordered)]

    def rank(index: int) -> tuple[float, int, int]:
        return (scores[index], ordered[index].queued_tokens, (index - chooser.turn) % count)

    best = min(range(count), key=rank)
    return Choice(ordered[best], {candidate.node_id: round(scores[i], 3) for i, candidate in enumerate(ordered)})


def place(
    query: Query,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    *,
    policy: str,
    local_prefill_tokens: int,
    chooser: Chooser,
) -> Decision:
    """Pick nodes for one attempt.

    Invariant: a relay is only ever planned between nodes whose KV means the same. Raises: Unavailable
    when there is no decode node.
    """
    if not decode:
        raise Unavailable("no decode node is available now; try again")
    chooser.turn += 1
    preferred = [node for node in decode if node.incarnation not in query.avoid]
    target = choose(policy, preferred or decode, chooser)
    uncached = query.num_tokens - target.picked.hit_tokens
    if uncached <= local_prefill_tokens:
        return Decision(policy, "local", f"{uncached} uncached tokens are cheaper without a relay", target)
    if not prefill:
        return Decision(policy, "local", "no prefill node is available", target)
    if target.picked.incarnation in query.avoid:
        return Decision(policy, "local", f"a relay to {target.picked.node_id} failed, there is no other", target)
    fitting = [node for node in prefill if node.kv_kind == target.picked.kv_kind]
    if not fitting:
        return Decision(policy, "local", f"no prefill node has the KV of {target.picked.node_id}", target)
    sources = [node for node in fitting if node.incarnation not in query.avoid]
    if not sources and query.last:
        return Decision(policy, "local", "the prefill nodes failed this request before", target)
    source = choose(policy, sources or fitting, chooser)
    reason = f"{uncached} uncached tokens"
    if not sources:
        reason += "; the prefill nodes failed this request before, there is no other"
    return Decision(policy, "relayed", reason, target, source)
