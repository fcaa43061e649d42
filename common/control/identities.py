"""What names an attempt, a node and an adapter in messages. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ConfigDict

_STRICT = ConfigDict(extra="forbid")


class AttemptKey(NamedTuple):
    """One attempt to serve one request. The router makes `request_id`; `attempt` counts from 1."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class Adapter(NamedTuple):
    """A LoRA adapter: equal ones have equal weights."""

    name: str
    digest: str
    """Hexadecimal SHA-256 of its weights and of the configuration that they are applied with."""

    @property
    def lora_id(self) -> str:
        """The adapter's part of `root_hash`: KV computed with other weights under the same name has another root."""
        return f"{self.digest}:{self.name}"


@dataclass(frozen=True)
class PeerRef:
    """Addresses of a node's current incarnation."""

    __pydantic_config__ = _STRICT
    node_id: str
    incarnation: str
    control_address: str
    """Address of the leader's control socket, `tcp://HOST:PORT`."""
    data_addresses: list[str]
    """Where each rank takes KV, in rank order: an address of each transport, separated by spaces
    (`kvtransfer.transports.choose`). Empty for nodes that only send."""
