"""The identities of an attempt, a node and an adapter in messages, and the type of token ids and block ids. Pure.

`Ids` are arrays of uint32, made by `pack_ids`. Lists would take ten times the memory, and would have to be checked item by
item.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from common.base.message_types import StrictFields

_ID_BYTES = 4


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
class PeerRef(StrictFields):
    """Addresses of a node's current incarnation."""

    node_id: str
    incarnation: str
    control_address: str
    """Address of the leader's control socket, `tcp://HOST:PORT`."""
    data_addresses: list[str]
    """Where each rank receives KV, in rank order: one address per transport, separated by spaces
    (`kvtransfer.transports.choose`). Empty for nodes that only send."""


class _OnWire:
    """Encodes `Ids` as the bytes of uint32 in the machine's order; all machines that kvrelay runs on are little-endian."""

    @staticmethod
    def __get_pydantic_core_schema__(_: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_from_bytes, core_schema.bytes_schema(strict=True))


if TYPE_CHECKING:
    Ids = Annotated[array[int], _OnWire]
else:  # Python 3.11 has no `array[int]`
    Ids = Annotated[array, _OnWire]


def pack_ids(values: Iterable[int] = ()) -> array[int]:
    """Pack ids into an array. Raises: OverflowError for a value that is not an id."""
    return array("I", values)


def _from_bytes(data: bytes) -> array[int]:
    if len(data) % _ID_BYTES:
        raise ValueError(f"{len(data)} bytes are not a whole number of ids")
    values = pack_ids()
    values.frombytes(data)
    return values
