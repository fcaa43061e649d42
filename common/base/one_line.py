"""JSON texts that are one line for every reader. Pure."""

from __future__ import annotations

_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}
"""Unicode's line ends that JSON may have in strings, and as it escapes them."""


def one_line(text: bytes) -> bytes:
    """Compact JSON in UTF-8, with Unicode's line ends escaped: what reads lines as `str.splitlines` does, such as httpx's
    `iter_lines` in ollama's client, would cut it there.
    """
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text
