"""Block hashes: the same in every process, on every machine, under every PYTHONHASHSEED.

A block's hash is SHA-256, truncated to 16 bytes, over a typed, length-delimited encoding of (parent hash, the block's
token ids). The chain starts at a root that covers everything else that the KV depends on: the model's fingerprint, the
LoRA adapter and the tenant's `cache_salt`. Two sequences share a block's hash if and only if they share the whole prefix
*and* that root.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

HASH_BYTES = 16
BLOCK_SIZE = 16
"""Default number of token slots per KV block; every `KVSpec` states its own."""

_TOKEN_BYTES = 4
BlockHash = bytes


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload


@lru_cache(maxsize=1024)
def root_hash(fingerprint: str, *, cache_salt: str = "", lora_id: str = "") -> BlockHash:
    """The parent of a sequence's first block."""
    encoded = _field(b"F", fingerprint.encode()) + _field(b"L", lora_id.encode()) + _field(b"S", cache_salt.encode())
    return hashlib.sha256(b"kvrelay-root-1" + encoded).digest()[:HASH_BYTES]


def hash_blocks(
    root: BlockHash,
    token_ids: Sequence[int],
    *,
    block_size: int = BLOCK_SIZE,
    parents: Sequence[BlockHash] = (),
    include_partial: bool = False,
) -> list[BlockHash]:
    """Chained hashes of the full blocks of `token_ids`.

    `parents` are the known hashes of the leading blocks; only later hashes are computed. With `include_partial` the last
    block is hashed even if it is not full: it is never cached, but a transfer names every block that it moves.
    """
    hashes = list(parents)
    parent = hashes[-1] if hashes else root
    start = len(hashes) * block_size
    stop = len(token_ids) if include_partial else len(token_ids) - len(token_ids) % block_size
    full = stop - stop % block_size
    head, tokens = _head(block_size), _encode(token_ids[start:full])
    for at in range(0, len(tokens), size := _TOKEN_BYTES * block_size):
        parent = hashlib.sha256(b"P" + parent + head + tokens[at : at + size]).digest()[:HASH_BYTES]
        hashes.append(parent)
    if stop > max(full, start):
        partial = _head(stop - full) + _encode(token_ids[full:stop])
        hashes.append(hashlib.sha256(b"P" + parent + partial).digest()[:HASH_BYTES])
    return hashes


def _head(num_tokens: int) -> bytes:
    return b"T" + struct.pack("<Q", _TOKEN_BYTES * num_tokens)


def _encode(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids.tobytes()
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
