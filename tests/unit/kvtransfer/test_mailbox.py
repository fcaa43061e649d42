"""The mailbox of an I/O thread: no command is lost, and nothing keeps its reader awake once it is empty."""

from __future__ import annotations

import select
import threading
from typing import Any

import pytest

from kvtransfer.mailbox import Mailbox


@pytest.fixture
def mailbox() -> Any:
    made = Mailbox()
    yield made
    made.close()


def readable(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_commands_are_taken_in_order_and_wake_the_reader_once(mailbox: Mailbox) -> None:
    seen: list[int] = []
    for number in range(3):
        mailbox.put(lambda number=number: seen.append(number))
    assert readable(mailbox)
    for command in mailbox.take():
        command()
    assert seen == [0, 1, 2]
    assert not readable(mailbox)


def test_byte_written_after_its_command_was_taken_does_not_keep_the_reader_awake(mailbox: Mailbox) -> None:
    """The writer is between its append and its write when the reader, awake for another reason, takes everything."""
    mailbox._commands.append(lambda: None)
    mailbox._woken = True
    assert len(mailbox.take()) == 1
    mailbox._writer.send(b"\0")
    assert readable(mailbox)
    assert mailbox.take() == []
    assert not readable(mailbox), "the reader would never sleep again"


def test_many_writers_lose_nothing_and_the_reader_sleeps_afterwards(mailbox: Mailbox) -> None:
    def write() -> None:
        for _ in range(500):
            mailbox.put(lambda: None)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    taken = 0
    while taken < 2000:
        assert select.select([mailbox.fileno()], [], [], 10)[0], f"only {taken} commands woke the reader"
        taken += len(mailbox.take())
    for writer in writers:
        writer.join()
    mailbox.take()
    assert not readable(mailbox)
