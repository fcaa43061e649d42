"""The type of token ids and block ids in messages. Pure.

`Ids` are arrays of uint32, made by `pack_ids`. Lists would take ten times the memory, and would have to be checked item by
item.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_ID_BYTES = 4


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
