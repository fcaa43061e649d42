"""Counts the items of a frame before it is unpacked, so that no frame takes many times its size in memory. Pure.

An item of one byte takes up to 90 bytes as a Python object, and more while it is checked. The long parts of messages are one
item each: text, hashes, and ids (`common.control.identities`).
"""

from __future__ import annotations

from common.base.errors import ProtocolError

SMALL_BYTES = 16_384
"""Items of a frame of up to this size are not counted, because they take at most 2 MB."""
_ITEMS, _BYTES_PER_ITEM = 8192, 256
"""Maximum items of a larger frame: the first number, plus one per `_BYTES_PER_ITEM` bytes."""
SENT_ITEMS = _ITEMS // 2
"""Senders split their messages so that none has more items than this."""

_SIZES = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 1),
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1), 3),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
}
"""Size of an item of fixed size, by its first byte."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Size of the length field of binary data or text, by its first byte."""
_COUNTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Size of the count field of a list or map, and items per entry, by its first byte."""


def check_item_count(frame: bytes | bytearray) -> None:
    """Count the items of a frame. Raises: ProtocolError for too many items for its size, and for extension types.

    Unpacking checks everything else about the MessagePack.
    Source: MessagePack's specification, "Formats".
    """
    size = len(frame)
    if size <= SMALL_BYTES:
        return
    left = _ITEMS + size // _BYTES_PER_ITEM
    expected, at = 1, 0
    while expected and at < size:
        first = frame[at]
        expected -= 1
        left -= 1
        if first <= 0x7F or first >= 0xE0:
            at += 1
        elif first <= 0x8F:
            expected += 2 * (first & 0x0F)
            at += 1
        elif first <= 0x9F:
            expected += first & 0x0F
            at += 1
        elif first <= 0xBF:
            at += 1 + (first & 0x1F)
        elif first in _SIZES:
            at += _SIZES[first]
        elif first in _LENGTHS:
            end = at + 1 + _LENGTHS[first]
            at = end + int.from_bytes(frame[at + 1 : end], "big")
        elif first in _COUNTS:
            width, each = _COUNTS[first]
            end = at + 1 + width
            expected += each * int.from_bytes(frame[at + 1 : end], "big")
            at = end
        else:
            raise ProtocolError("an extension type of MessagePack")
        if expected > left:
            raise ProtocolError(f"a frame of {size} bytes has too many items")
