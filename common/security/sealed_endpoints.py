"""Addresses of receivers of sealed messages, which contain the receiver's key, and the sizes of sealed frames.

Imports none of the packages that `common.security.sealing` needs: nodes without certificates run without them.
"""

from __future__ import annotations

import re

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 32
OVERHEAD_BYTES = TAG_BYTES + NONCE_BYTES
"""A sealed frame is longer than its content by a tag and a nonce."""
_IN_ADDRESS = re.compile(r"\?key=[0-9a-f]+")


def with_key(address: str, key: bytes | None) -> str:
    """`address` with the key of the server behind it."""
    return address if key is None else f"{address}?key={key.hex()}"


def split_key(address: str) -> tuple[str, bytes | None]:
    """An address without its key, and the key. Raises: ValueError if that is not a key."""
    plain, separator, key = address.partition("?key=")
    if not separator:
        return address, None
    raw = bytes.fromhex(key)
    if len(raw) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(raw)}")
    return plain, raw


def without_keys(text: str) -> str:
    """`text` without the keys in its addresses: for logs, and for readers who must not connect."""
    return _IN_ADDRESS.sub("", text)
