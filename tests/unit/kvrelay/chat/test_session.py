from __future__ import annotations

import io
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

from kvrelay.chat.session import ChatSession
from kvrelay.chat.stream import ChatFailed, TextPiece


class FakeServer:
    """Answers every message with its text twice, in two pieces."""

    def __init__(self) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.closed = 0

    def stream(self, body: Mapping[str, Any]) -> Generator[TextPiece]:
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        try:
            yield TextPiece(text)
            if text == "stop":
                raise KeyboardInterrupt
            if text == "fail":
                raise ChatFailed("no node")
            yield TextPiece(text, "why" if text == "think" else "")
        finally:
            self.closed += 1


def lines(*texts: str | type[BaseException]) -> Callable[[str], str]:
    waiting = iter(texts)

    def read(prompt: str) -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line + "\n"
        raise line

    return read


def chat(
    *texts: str | type[BaseException], interactive: bool = True, system: str = ""
) -> tuple[ChatSession, FakeServer, str, str]:
    server, out, err = FakeServer(), io.StringIO(), io.StringIO()
    session = ChatSession(server.stream, {"model": "m"}, system=system, interactive=interactive, out=out, err=err)
    session.run(lines(*texts))
    return session, server, out.getvalue(), err.getvalue()


def test_the_conversation_goes_along_with_every_message() -> None:
    _, server, out, _ = chat("one", "two", system="be brief")
    assert out == "oneone\ntwotwo\n"
    assert server.bodies[1]["model"] == "m"
    assert [(message["role"], message["content"]) for message in server.bodies[1]["messages"]] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "oneone"),
        ("user", "two"),
    ]


def test_reset_forgets_the_conversation_but_not_the_system_message() -> None:
    _, server, _, _ = chat("one", "/reset", "two", system="be brief")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["be brief", "two"]


def test_exit_ends_and_other_commands_are_not_sent() -> None:
    _, server, _, err = chat("/help", "", "/exit", "never")
    assert not server.bodies
    assert err.count("/reset forgets") == 2


def test_an_interrupt_stops_the_answer_and_keeps_what_came() -> None:
    _, server, out, _ = chat("stop", "go on")
    assert out == "stop\ngo ongo on\n"
    assert server.closed == 2
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["stop", "stop", "go on"]


def test_an_interrupt_at_the_prompt_does_not_end_the_chat() -> None:
    _, server, _, _ = chat(KeyboardInterrupt, "one")
    assert len(server.bodies) == 1


def test_a_failed_message_is_forgotten_and_counted() -> None:
    session, server, _, err = chat("fail", "one")
    assert session.failed == 1
    assert "kvrelay: no node" in err
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one"]


def test_a_pipe_gets_answers_only() -> None:
    _, _, out, err = chat("one", "think", interactive=False)
    assert (out, err) == ("oneone\nthinkthink\n", "")


def test_an_interrupt_ends_a_chat_of_a_pipe() -> None:
    with pytest.raises(KeyboardInterrupt):
        chat("stop", "never", interactive=False)


def test_a_terminal_shows_reasoning_apart_and_no_control_characters() -> None:
    _, _, out, _ = chat("think", "a\x1b[31m\ttab")
    assert "\x1b[2mwhy\x1b[0mthink" in out
    assert "a?[31m\ttab" in out
