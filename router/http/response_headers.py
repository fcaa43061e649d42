"""How a request was served: for response headers, the last chunk of a stream, and errors. Pure.

`x-kvrelay-*` headers and the `kvrelay` object of a stream's last chunk have the same fields under the same names
(`prefill_node` is `x-kvrelay-prefill-node`). Unknown fields are left out.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from router.requests.generation import Generation

OF_MESSAGES = "msg_"
"""Prefix of the ids of Anthropic's calls."""
OF_REFUSALS = "req_"
"""Prefix of the ids of requests that no call has seen, such as those without an API key."""
_ID_BYTES = 12
_pool: list[str] = []
"""Random parts of ids to come: the system is asked for many at once."""

_DETAILS = "attempt policy reason prefill-mode decode-node prefill-node prefill-hit-tokens decode-hit-tokens relayed-bytes decision"
"""Names of the headers that `headers` returns beside ids."""
OWN_HEADERS = tuple(
    f"x-kvrelay-{name}" for name in ("request-id", *_DETAILS.split(), "ignored", "fitted", "relaxed", "parts")
)
"""All headers of this project that an answer may have."""

RawHeaders = list[tuple[bytes, bytes]]
"""Headers in ASGI's form."""

_MAX_HEADER_CHARS = 256
_MAX_DECISION_CHARS = 2048


class RequestIds(NamedTuple):
    """The router's id of a request and the client's own (or empty). Only the router's is used as a key."""

    own: str
    client: str = ""

    @staticmethod
    def make(prefix: str, client: str) -> RequestIds:
        """A new unique id, which nobody can guess."""
        return RequestIds(f"{prefix}{_random_hex()}", printable(client))

    def headers(self) -> RawHeaders:
        """`x-request-id` is the client's own if it gave one. Anthropic's clients look for `request-id`."""
        own = self.own.encode()
        shown = [(b"x-request-id", self.client.encode() or own), (b"x-kvrelay-request-id", own)]
        return [*shown, (b"request-id", own)] if self.own.startswith(OF_MESSAGES) else shown


def _random_hex() -> str:
    if not _pool:
        digits = os.urandom(256 * _ID_BYTES).hex()
        _pool.extend(digits[at : at + 2 * _ID_BYTES] for at in range(0, len(digits), 2 * _ID_BYTES))
    return _pool.pop()


def printable(text: str, limit: int = _MAX_HEADER_CHARS) -> str:
    """`text` as a valid header value: ASCII without control characters, at most `limit` long."""
    text = text[:limit]
    if text.isascii() and text.isprintable():
        return text  # nearly always; a loop over characters would take 7 % of a small request
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def serving_details(generation: Generation) -> dict[str, str | int]:
    """Attempt, nodes, policy and reason, prefix hits of either node and relayed bytes, as far as known now."""
    decision, served = generation.decision, generation.served
    if decision is None:
        return {"request_id": generation.request_id, "attempt": 0}
    about: dict[str, str | int] = {
        "request_id": generation.request_id,
        "attempt": generation.flow.attempt,
        "policy": decision.policy,
        "reason": decision.reason,
        "prefill_mode": decision.mode,
        "decode_node": decision.decode.node_id,
    }
    if decision.prefill is not None:
        about["prefill_node"] = decision.prefill.node_id
    if served.prefill_hit_tokens is not None:
        about["prefill_hit_tokens"] = served.prefill_hit_tokens
    if served.decode_hit_tokens is not None:
        about["decode_hit_tokens"] = served.decode_hit_tokens
        about["relayed_bytes"] = served.relayed_bytes
    return about


def headers(ids: RequestIds, generation: Generation | None) -> RawHeaders:
    """Headers of an answer or an error. `generation` is None if the request was refused before any attempt."""
    out = ids.headers()
    if generation is None:
        return [*out, (b"x-kvrelay-attempt", b"0")]
    about = serving_details(generation)
    del about["request_id"]  # names one generation; the answer may have several
    out += [(_header(name), _value(value)) for name, value in about.items()]
    decision = generation.decision
    if decision is not None:
        out.append((b"x-kvrelay-decision", decision.weighed(_MAX_DECISION_CHARS).encode()))
    return out


@lru_cache
def _header(name: str) -> bytes:
    return f"x-kvrelay-{name.replace('_', '-')}".encode()


@lru_cache(4096)
def _value(value: str | int) -> bytes:
    return printable(str(value)).encode()
