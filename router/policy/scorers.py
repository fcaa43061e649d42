"""The scorers that look at no prefix: each gives a score per node, and the lowest wins. `kv_aware` has a file of its own. Pure."""

from __future__ import annotations

import numpy as np

from router.policy.base import Memory, Policy, Query
from router.policy.fleet import Fleet, FloatArray, stable_hash

_SPILL = 1.25
"""Multiple of the mean load above which sessions spill."""


def least_load(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """The classic data-parallel score: 4 x waiting + running, this router's unreported requests included."""
    return fleet.columns.load


def round_robin(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """Distance from the node whose turn it is, in the order of names."""
    return (np.arange(len(fleet), dtype=np.float64) - memory.turn) % len(fleet)


def at_random(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """One node gets 0, all others 1."""
    scores = np.ones(len(fleet))
    scores[memory.rng.randrange(len(fleet))] = 0.0
    return scores


def power_of_two(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """Two random nodes have their load as score, all others infinity.

    The less loaded of two nodes is nearly as good as the best of all, and routers do not all pick the same node.
    """
    drawn = memory.rng.sample(range(len(fleet)), min(2, len(fleet)))
    scores = np.full(len(fleet), np.inf)
    scores[drawn] = fleet.columns.load[drawn]
    return scores


def session(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """Requests of one session go to one node, by rendezvous hashing.

    The score is a hash of session and node between 0 and 1, plus 1 where the node has more than 1.25 x the mean load.
    When a node comes or goes, only its own sessions move. While it is overloaded, its sessions go to their second-best nodes.
    The key is the client's (`x-session-id`, or `user`), else the prompt's first block. Without any key a random node serves.
    """
    key = stable_hash(query.session) if query.session else memory.rng.getrandbits(64)
    weights = _mix(fleet.node_hash ^ np.uint64(key)) / 2.0**64
    load = fleet.columns.requests + 1
    return weights + (load > _SPILL * load.mean())


def _mix(values: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
    """The finaliser of a 64-bit hash: every bit of the input moves every bit of the result.

    Source: D. Stafford's variant 13 of the MurmurHash3 finaliser.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


POLICIES = (
    Policy("least_load", least_load),
    Policy("round_robin", round_robin),
    Policy("random", at_random),
    Policy("power_of_two", power_of_two),
    Policy("session", session),
)
