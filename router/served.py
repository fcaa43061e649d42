"""How an answer was served: for its headers, for the end of its stream, for its errors. Pure.

`x-kvrelay-*` headers and the `kvrelay` object of a stream's last chunk hold the same things under the same names
(`prefill_node` is `x-kvrelay-prefill-node`). What is not known, or is not so, is left out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from router.generation import Generation

_MAX_HEADER_CHARS = 256
_MAX_DECISION_CHARS = 2048


class RequestIds(NamedTuple):
    """What we call a request, and what its client calls it (or nothing). Only ours is ever a key."""

    own: str
    client: str = ""

    @staticmethod
    def make(prefix: str, client: str | None) -> RequestIds:
        """A fresh id of our own: unlike any other, but no secret."""
        return RequestIds(f"{prefix}-{random.getrandbits(96):024x}", printable(client or ""))

    def headers(self) -> dict[str, str]:
        """`x-request-id` is the client's own if it gave one."""
        return {"x-request-id": self.client or self.own, "x-kvrelay-request-id": self.own}


def printable(text: str, limit: int = _MAX_HEADER_CHARS) -> str:
    """`text` as a header may carry it: ASCII without control characters, bounded."""
    text = text[:limit]
    if text.isascii() and text.isprintable():
        return text  # nearly always, on the way of every request
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def how_served(generation: Generation) -> dict[str, str | int]:
    """Attempt, nodes, policy and reason, prefix hits of either node and relayed bytes, as far as known now."""
    decision, served = generation.decision, generation.served
    about: dict[str, str | int] = {"request_id": generation.request_id, "attempt": generation.flow.attempt}
    if decision is None:
        return {**about, "attempt": 0}
    known: dict[str, str | int | None] = {
        "policy": decision.policy,
        "reason": decision.reason,
        "prefill_mode": decision.mode,
        "prefill_node": None if decision.prefill is None else decision.prefill.picked.node_id,
        "decode_node": decision.decode.picked.node_id,
        "prefill_hit_tokens": served.prefill_hit_tokens,
        "decode_hit_tokens": served.decode_hit_tokens,
        "relayed_bytes": None if served.decode_hit_tokens is None else served.relayed_bytes,
    }
    return about | {name: value for name, value in known.items() if value is not None}


def headers(ids: RequestIds, generation: Generation | None) -> dict[str, str]:
    """The headers of an answer or an error. None: it was refused before anything was tried."""
    if generation is None:
        return {**ids.headers(), "x-kvrelay-attempt": "0"}
    about: Mapping[str, str | int] = how_served(generation)
    out = {_header(name): printable(value) if isinstance(value, str) else str(value) for name, value in about.items()}
    decision = generation.decision
    if decision is not None:
        out["x-kvrelay-decision"] = decision.to_json(_MAX_DECISION_CHARS)
    return out | ids.headers()


@lru_cache
def _header(name: str) -> str:
    return f"x-kvrelay-{name.replace('_', '-')}"
