"""The identities of an attempt, a node and an adapter in messages. Pure data."""

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
    """A LoRA adapter; equal values mean equal weights."""

    name: str
    digest: str
    """Hexadecimal SHA-256 of the adapter's weights and of the configuration with which they are applied."""

    @property
    def lora_id(self) -> str:
        """The adapter's part of `root_hash`, so that KV computed with other weights under the same name has another root."""
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
    """Where each rank receives KV, in rank order: one address per transport, separated by spaces
    (`kvtransfer.transports.choose`). Empty for nodes that only send."""
