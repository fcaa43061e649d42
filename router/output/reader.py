"""Reads generated text that arrives in pieces. Pure; runs on the router's event loop.

A format is a generator function over a `TextReader` and an `OutputWriter`: it reads as if the whole text were there, and waits
(`yield`) where more text is needed. All reading goes through the methods of `TextReader`, which consume the same
characters however the text is cut; so the joined result does not depend on the cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
Emit = Callable[[str], object]

_MAX_UNDECIDED_CHARS = 65_536
"""Text that may still turn out to be malformed is kept; longer text counts as malformed."""
_MAX_REREAD_CHARS = 4 * _MAX_UNDECIDED_CHARS
"""After re-reading this much of a text, later markers count as plain text: each may cause all text after it to be re-read."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_NOT_WORD = re.compile(r"[^-+.\w]")


class Malformed(Exception):
    """The text does not follow the format."""


class TextReader:
    """The text of one choice and the position up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._reread_chars = 0
        """Number of characters that `rewind` has gone back in all."""
        self._ended = False

    def feed(self, text: str) -> None:
        """Append text."""
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """No more text follows."""
        self._ended = True

    def mark(self) -> None:
        """Keep the text from here on, for `rewind`."""
        self._mark = self._at

    def rewind(self) -> None:
        """Go back to the mark, if there is one, and drop it."""
        if self._mark is not None:
            # A text that arrives at once may have been read beyond the limit, which counts as if it had come in pieces.
            self._reread_chars += min(self._at - self._mark, _MAX_UNDECIDED_CHARS)
            self._at, self._mark = self._mark, None

    def unread(self, text: str) -> None:
        """Go back behind `text`, which was read last."""
        self._at -= len(text)

    def release(self) -> None:
        """Drop the mark: the text since then followed the format.

        Raises: Malformed when that text is too long; the mark remains.
        """
        if self._mark is not None and self._at - self._mark > _MAX_UNDECIDED_CHARS:
            raise Malformed
        self._mark = None

    def attempt(self, head: Steps[_T]) -> Steps[_T | None]:
        """Read what `head` reads, such as a call up to its arguments. None: that is malformed, and nothing has been read."""
        self.mark()
        try:
            found = yield from head
            self.release()
        except Malformed:
            self.rewind()
            return None
        return found

    def _more(self) -> Steps[bool]:
        """Wait for text behind what is there; False: there is none."""
        size = len(self._text) - self._at
        while not self._ended:
            if self._mark is not None and len(self._text) - self._mark > _MAX_UNDECIDED_CHARS:
                raise Malformed
            yield
            if len(self._text) - self._at > size:
                return True
        return False

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        if self._at == len(self._text) and not (yield from self._more()):
            return ""
        return self._text[self._at]

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next; else read nothing."""
        while not self._text.startswith(literal, self._at):
            if not literal.startswith(self._text[self._at :]) or not (yield from self._more()):
                return False
        self._at += len(literal)
        return True

    def expect(self, literal: str) -> Steps[None]:
        """Read `literal`. Raises: Malformed when something else comes next."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def skip_space(self) -> Steps[str]:
        """Read white space; return it."""
        return (yield from self.take_until(_NOT_SPACE))

    def take_until(self, end: re.Pattern[str]) -> Steps[str]:
        """Read up to a character that matches `end`, or to the end."""
        parts: list[str] = []
        while True:
            found = end.search(self._text, self._at)
            stop = len(self._text) if found is None else found.start()
            parts.append(self._text[self._at : stop])
            self._at = stop
            if found is not None or not (yield from self._more()):
                return "".join(parts)

    def until(self, markers: tuple[str, ...], emit: Emit) -> Steps[str | None]:
        """Pass the text before the first of `markers` to `emit`, as it arrives, and read the marker.

        Returns: the marker; None: the text ended without one.
        """
        while True:
            at, marker = self._find(markers)
            if at > self._at:
                emit(self._text[self._at : at])
                self._at = at
            if marker is not None:
                self._at += len(marker)
                return marker
            if not (yield from self._more()):
                if self._at < len(self._text):
                    emit(self._text[self._at :])
                    self._at = len(self._text)
                return None

    def _find(self, markers: tuple[str, ...]) -> tuple[int, str | None]:
        """The first position at which a marker is or may begin, and the marker if all of it is there."""
        text, first, found = self._text, len(self._text), None
        if self._reread_chars > _MAX_REREAD_CHARS:
            return first, None
        for marker in markers:
            at = text.find(marker[0], self._at, first)
            while at >= 0:
                if text.startswith(marker, at):
                    first, found = at, marker
                elif not self._ended and len(text) - at < len(marker) and marker.startswith(text[at:]):
                    first, found = at, None
                at = text.find(marker[0], at + 1, first)
        return first, found

    def json_value(self, emit: Emit) -> Steps[None]:
        """Read one JSON value and pass it to `emit` as it is written. Only brackets and strings are checked, so that a
        client gets the model's arguments even if they have an error.

        Raises: Malformed when it does not begin with one, when the text ends within it, or at a `<` outside of strings,
        which begins a marker.
        """
        first = yield from self.peek()
        if first in ("{", "["):
            yield from self._nested(emit)
        elif first == '"':
            self._at += 1
            emit('"')
            yield from self._rest_of_string(emit)
        else:
            word = yield from self.take_until(_NOT_WORD)
            if not word:
                raise Malformed
            emit(word)

    def _nested(self, emit: Emit) -> Steps[None]:
        depth = 0
        while True:
            found = _OUTSIDE_STRING.search(self._text, self._at)
            if found is None:
                yield from self._pass_all(emit)
                continue
            char = found[0]
            if char == "<":
                if found.start() > self._at:
                    emit(self._text[self._at : found.start()])
                    self._at = found.start()
                raise Malformed
            emit(self._text[self._at : found.end()])
            self._at = found.end()
            if char == '"':
                yield from self._rest_of_string(emit)
                continue
            depth += 1 if char in "{[" else -1
            if depth == 0:
                return

    def _rest_of_string(self, emit: Emit) -> Steps[None]:
        while True:
            found = _IN_STRING.search(self._text, self._at)
            if found is None:
                yield from self._pass_all(emit)
                continue
            emit(self._text[self._at : found.end()])
            self._at = found.end()
            if found[0] == '"':
                return
            escaped = yield from self.peek()
            if not escaped:
                raise Malformed
            emit(escaped)
            self._at += 1

    def _pass_all(self, emit: Emit) -> Steps[None]:
        """Pass the text that is there to `emit`, and wait for more."""
        if self._at < len(self._text):
            emit(self._text[self._at :])
            self._at = len(self._text)
        if not (yield from self._more()):
            raise Malformed
