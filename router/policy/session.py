"""`session`: requests of one session go to one node, by rendezvous hashing.

    score = rank of hash(session, node), + 1 where the node has more than 1.25 x the mean load

Each node has a weight for each session, and the node with the best weight serves it: when a node comes or goes, only its
own sessions move. While that node is overloaded, the session goes to its second-best node. The key is the client's
(`x-session-id`, or `user`), else the prompt's first block. Without any key a random node serves.
"""

from __future__ import annotations

import numpy as np

from router.policy.base import Memory, Policy, Query
from router.policy.fleet import Fleet, FloatArray, stable_hash

_SPILL = 1.25
"""Multiple of the mean load above which sessions spill."""


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """A hash between 0 and 1, plus 1 for an overloaded node."""
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


POLICY = Policy("session", score)
