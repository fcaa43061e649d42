"""Parts of messages: a count with its noun, and JSON text as one line for every reader. Pure."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return for example `1 node` or `2 nodes`. `noun` is the singular; an irregular plural follows a slash: `entry/entries`."""
    one, _, more = noun.partition("/")
    return f"{count} {one if count == 1 else more or one + 's'}"


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
