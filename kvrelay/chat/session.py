"""A conversation in a terminal or a pipe: reads messages and commands, shows answers as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, TextIO

from kvrelay.chat.stream import ChatFailed, TextPiece

Send = Callable[[Mapping[str, Any]], Generator[TextPiece]]
"""Type of `ChatClient.stream`."""

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"
_PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatSession:
    """One conversation. Answers go to `out`, everything else to `err`, so that a pipe gets answers only."""

    def __init__(
        self,
        send: Send,
        fields: Mapping[str, Any],
        *,
        system: str = "",
        interactive: bool,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """`fields`: of every request's body, beside the messages."""
        self._send = send
        self._fields = dict(fields)
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self._interactive = interactive
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self.failed = 0
        """Number of messages without a whole answer because of an error."""

    def run(self, read_line: Callable[[str], str]) -> None:
        """Answer lines until `read_line(prompt)` raises EOFError or the user ends the chat."""
        if self._interactive:
            self._say(_COMMANDS)
        while True:
            try:
                line = read_line(_PROMPT if self._interactive else "").strip()
            except EOFError:
                return self._say("")
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._say("\n" + _COMMANDS)
                continue
            if line == "/exit":
                return None
            if line == "/reset":
                self._messages.clear()
                self._say("the conversation is forgotten")
            elif line.startswith("/") and self._interactive:
                self._say(_COMMANDS)
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        """Show the answer to a message. An answer that the user stopped stays in the conversation, cut off; a failed one is forgotten with its message."""
        question = {"role": "user", "content": text}
        body = {**self._fields, "messages": [*self._system, *self._messages, question]}
        parts: list[str] = []
        try:
            with closing(self._send(body)) as pieces:
                for piece in pieces:
                    self._show(piece)
                    parts.append(piece.text)
        except ChatFailed as error:
            self.failed += 1
            self._end_line(parts)
            print(f"kvrelay: {error}", file=self._err, flush=True)
            return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        self._end_line(parts or [" "])
        self._messages += [question, {"role": "assistant", "content": "".join(parts)}]

    def _show(self, piece: TextPiece) -> None:
        text = piece.text
        if self._interactive:
            # What a model writes must not steer the terminal.
            text = _printable(text)
            if piece.reasoning:
                text = f"{_DIM}{_printable(piece.reasoning)}{_PLAIN}{text}"
        self._out.write(text)
        self._out.flush()

    def _end_line(self, parts: list[str]) -> None:
        if parts:
            self._out.write("\n")
            self._out.flush()

    def _say(self, text: str) -> None:
        if self._interactive:
            print(text, file=self._err, flush=True)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)
