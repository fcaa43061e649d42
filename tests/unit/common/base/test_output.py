"""Lines to a reader that may stand still: a pipe that is full, a terminal that is stopped."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import termios
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from common.base.output import Output


class Pipe:
    """A pipe of the smallest size, with the stream that writes to it."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.reading, writing = os.pipe()
        self.size_bytes = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self.stream: TextIO = os.fdopen(writing, "w", encoding=encoding)
        self.output = Output(self.stream)

    def read(self) -> str:
        return os.read(self.reading, 1 << 20).decode()


def fill(output: Output) -> None:
    """Write until nothing more fits."""
    for number in range(100_000):
        try:
            output.write("x" * (number % 100) + "\n")
        except BlockingIOError:
            return
    pytest.fail("it took everything")


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.stream.close()
    os.close(made.reading)


def test_who_does_not_read_delays_one_line_and_no_other(pipe: Pipe) -> None:
    fill(pipe.output)
    began_s = time.monotonic()
    for _ in range(100):
        with pytest.raises(BlockingIOError):
            pipe.output.write("lost\n")
    assert time.monotonic() - began_s < 0.1
    pipe.read()
    pipe.output.write("kept\n")
    assert pipe.read().endswith("kept\n")


def test_a_line_that_was_cut_ends_before_the_next_one(pipe: Pipe) -> None:
    with pytest.raises(BlockingIOError):
        pipe.output.write("x" * 3 * pipe.size_bytes + "\n")
    cut = pipe.read()
    assert set(cut) == {"x"}
    pipe.output.write("next\n")
    assert pipe.read() == "\nnext\n"


def test_a_line_of_many_pipes_arrives_whole(pipe: Pipe) -> None:
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(pipe.read() for _ in range(100) if "\n" not in "".join(got)))
    reader.start()
    pipe.output.write("x" * 20 * pipe.size_bytes + "\n")
    reader.join(10)
    assert "".join(got) == "x" * 20 * pipe.size_bytes + "\n"


def test_what_the_encoding_lacks_is_escaped() -> None:
    made = Pipe("ascii")
    made.output.write("caf\xe9 \udcff\n")
    assert made.read() == "caf\\xe9 \\udcff\n"
    made.stream.close()
    os.close(made.reading)


def test_a_terminal_that_is_stopped_loses_lines() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        output = Output(stream)
        output.write("before\n")
        termios.tcflow(follower, termios.TCOOFF)  # as Ctrl-S does
        fill(output)
        termios.tcflow(follower, termios.TCOON)
        os.read(leader, 1 << 16)
        output.write("after\n")
        assert select.select([leader], [], [], 10)[0]
        assert b"after" in os.read(leader, 1 << 16)
    os.close(leader)


def test_a_terminal_whose_window_hangs_loses_lines() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        output = Output(stream)
        fill(output)
    os.close(leader)


def test_a_stream_without_a_descriptor_is_written_as_it_is() -> None:
    stream = io.StringIO()
    Output(stream).write("line\n")
    assert stream.getvalue() == "line\n"
