"""Stream events that contain only text, serialized by concatenation. Router process, event loop.

The events of a choice differ only in their text, so one event is serialized with a marker in place of the text.
"""

from __future__ import annotations

from collections.abc import Callable

_MARKER = "\0text\0"
_MARKER_JSON = b'"\\u0000text\\u0000"'


class TextEvents:
    """The text events of one stream."""

    def __init__(self) -> None:
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the bytes before and after the text."""

    def event(self, choice: int, text_json: bytes, serialize: Callable[[str, int], bytes]) -> bytes:
        """The same bytes as `serialize(text, choice)`, which is called for the first event of a choice only."""
        around = self._around.get(choice)
        if around is None:
            before, _, after = serialize(_MARKER, choice).partition(_MARKER_JSON)
            around = self._around[choice] = before, after
        return b"".join((around[0], text_json, around[1]))
