"""The frames of the data plane. Pure; used by the I/O threads of both ends.

A data message is `[header, payload]`: the header is a `SliceHeader` as MessagePack, the payload the slices' KV one
after the other, each as `common.kv.memory_layout` places it: `[layers, planes, blocks, heads, block_size, width]`. Every
message is answered by one `SliceAck`, also when it was discarded, so that the sender can reuse the memory that it was
sent from. Layers and heads are numbered over the whole layer group, blocks over the sequence: a header means the same
on every rank of every layout. With context parallelism blocks are numbered over those of the sequence that both ranks hold
(`common.kv.stripes`); both ends know the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from common.base.errors import ProtocolError, TransferError
from common.base.hashing import HASH_BYTES
from common.base.message_types import StrictFields
from common.control.codec import Codec
from common.control.messages import AttemptKey
from common.control.versions import OLDEST_VERSION
from common.kv.rank_layout import GroupPart

MAX_HEADER_BYTES = 2**21
"""Room for the slices and `MAX_BLOCKS` hashes: a message that ends one layer and begins the next may name all of
them."""
MAX_BLOCKS = 3 * MAX_HEADER_BYTES // (4 * HASH_BYTES)
"""Blocks that one transfer may have: 1.5 million tokens."""
MAX_PAYLOAD_BYTES = 64 * 2**20
"""A payload above this is refused by the receiving socket before it is allocated."""
MAX_SLICES = 4096

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Name = Annotated[str, Field(max_length=256)]


@dataclass(frozen=True)
class KVSlice(StrictFields):
    """Blocks [block_lo, block_hi), of those of a sequence that both ranks hold, in some layers and KV heads of one group, as in
    `GroupPart`."""

    group: _Count
    layer_lo: _Count
    layer_hi: _Count
    head_lo: _Count
    head_hi: _Count
    block_lo: _Count
    block_hi: _Count

    @property
    def part(self) -> GroupPart:
        return GroupPart(self.group, self.layer_lo, self.layer_hi, self.head_lo, self.head_hi)

    @property
    def num_blocks(self) -> int:
        return self.block_hi - self.block_lo

    def size_bytes(self, unit_bytes: tuple[int, ...]) -> int:
        """Bytes of this slice, given `KVSpec.unit_bytes`; 0 for an empty or inverted range and for an unknown group."""
        layers, heads = self.layer_hi - self.layer_lo, self.head_hi - self.head_lo
        if min(layers, heads, self.num_blocks) <= 0 or self.group >= len(unit_bytes):
            return 0
        return layers * heads * self.num_blocks * unit_bytes[self.group]


@dataclass(frozen=True)
class SliceHeader(StrictFields):
    """The slices of one payload, their attempt, and the incarnations of sender and receiver."""

    key: AttemptKey
    src_incarnation: _Name
    dst_incarnation: _Name
    src_rank: _Count
    dst_rank: _Count
    sequence: Annotated[int, Field(ge=0, lt=2**63)]
    """Counts the messages of one connection; the ack repeats it."""
    slices: Annotated[list[KVSlice], Field(min_length=1, max_length=MAX_SLICES)]
    first_block: _Count
    block_hashes: Annotated[bytes, Field(max_length=MAX_HEADER_BYTES)]
    """Hashes of the blocks from `first_block` on, `HASH_BYTES` each, joined; they cover every slice."""


@dataclass(frozen=True)
class SliceAck(StrictFields):
    """The receiver has finished with message `sequence`. `code` is empty if it was accepted, else it names the error."""

    key: AttemptKey
    sequence: Annotated[int, Field(ge=0, lt=2**63)]
    code: _Name = ""
    message: Annotated[str, Field(max_length=4096)] = ""


MessageT = TypeVar("MessageT", SliceHeader, SliceAck)

_CODEC = Codec(SliceHeader, SliceAck, version=OLDEST_VERSION)


def encode(message: SliceHeader | SliceAck, version: int | None = None) -> bytes:
    """One header or ack as MessagePack bytes, for an end that reads `version`; None: the oldest."""
    return _CODEC.encode(message, version)


def decode_header(data: bytes | memoryview) -> SliceHeader:
    """The header in `data`, its hashes covering its slices. Raises: ProtocolError for anything else."""
    header = _decode(data, SliceHeader)
    if len(header.block_hashes) % HASH_BYTES:
        raise ProtocolError(f"block hashes are {HASH_BYTES} bytes each, got {len(header.block_hashes)} bytes in all")
    last = header.first_block + len(header.block_hashes) // HASH_BYTES
    if any(not header.first_block <= s.block_lo <= s.block_hi <= last for s in header.slices):
        raise ProtocolError("a slice has blocks that the header gives no hash of")
    return header


def decode_ack(data: bytes | memoryview) -> SliceAck:
    """The ack in `data`. Raises: ProtocolError for anything else."""
    return _decode(data, SliceAck)


def _decode(data: bytes | memoryview, kind: type[MessageT]) -> MessageT:
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header has at most {MAX_HEADER_BYTES} bytes, this one has {len(data)}")
    message = _CODEC.decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"expected a {kind.__name__}, got a {type(message).__name__}")
    return message


def checked_block_ids(tables: list[list[int]], hashes: list[bytes], num_blocks: int) -> np.ndarray:
    """A sequence's block tables as [tables, blocks] int64, each block inside the storage, each with its hash.

    Raises: TransferError.
    """
    if any(len(table) != len(hashes) for table in tables) or any(len(h) != HASH_BYTES for h in hashes):
        raise TransferError(f"{[*map(len, tables)]} blocks need as many hashes of {HASH_BYTES} bytes")
    if len(hashes) > MAX_BLOCKS:
        raise TransferError(f"{len(hashes)} blocks; one message can name {MAX_BLOCKS}")
    ids = np.array(tables, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < num_blocks:
        raise TransferError(f"block ids {ids.min()}..{ids.max()} in a storage of {num_blocks} blocks")
    return ids


def check_first_blocks(first_blocks: list[int], blocks: np.ndarray, lowest: list[int]) -> None:
    """Whether `first_blocks` names for each of the block tables `blocks` a block from `lowest` on, or its end.

    Raises: TransferError.
    """
    num_tables, total = blocks.shape
    if len(first_blocks) != num_tables or not all(
        low <= first <= total for low, first in zip(lowest, first_blocks, strict=True)
    ):
        raise TransferError(
            f"KV from blocks {first_blocks} on, of {num_tables} block tables that have {lowest} to {total}"
        )
