"""Makes JSON text one line for every reader. Pure."""

from __future__ import annotations

_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}
"""Unicode line ends that JSON strings may contain, each with its JSON escape."""


def one_line(text: bytes) -> bytes:
    """Escape Unicode's line ends in compact JSON (UTF-8). A reader that splits lines like `str.splitlines`, such as httpx's
    `iter_lines` in ollama's client, would cut the text there.
    """
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text
