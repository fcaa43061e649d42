"""Frames over a stream that TCP splits anywhere; the reader may stop at any frame, and the bytes may be arbitrary."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from common.control import frames
from common.control.frames import FrameConnection, with_length


class Transport:
    """What `FrameConnection` needs of asyncio's."""

    def __init__(self) -> None:
        self.reading, self.closed = True, False

    def get_extra_info(self, name: str) -> Any:
        return self

    def setsockopt(self, *_: object) -> None: ...

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closed
        self.reading = True

    def close(self) -> None:
        self.closed = True


def stream_of(sent: list[bytes]) -> bytes:
    return b"".join(map(with_length, sent))


async def deliver(pieces: list[bytes], close_after: int) -> tuple[list[bytes], list[str], int]:
    """(the frames taken, why it ended, the most that were taken in one turn)."""
    taken: list[bytes] = []
    ends: list[str] = []
    most = 0

    def take(frame: bytes | bytearray) -> None:
        assert not connection.closed
        taken.append(bytes(frame))
        if len(taken) == close_after:
            connection.close()

    connection, transport = FrameConnection(take, ends.append), Transport()
    connection.connection_made(cast("asyncio.Transport", transport))
    for piece in pieces:
        before = len(taken)
        while not transport.reading and not transport.closed:
            await asyncio.sleep(0)
            most, before = max(most, len(taken) - before), len(taken)
        if transport.closed:
            break
        connection.data_received(piece)
        most = max(most, len(taken) - before)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return taken, ends, most


@given(
    st.lists(st.one_of(st.binary(max_size=5), st.binary(min_size=300, max_size=400)), max_size=150),
    st.lists(st.integers(0, 20_000), max_size=30),
    st.integers(0, 20),
    st.integers(0, 200),
)
def test_every_frame_arrives_whole_in_order_and_once(
    sent: list[bytes], cuts: list[int], missing: int, close_after: int
) -> None:
    stream = stream_of(sent)
    whole = len(stream) - missing
    edges = [0, *sorted(cut for cut in cuts if cut < whole), max(0, whole)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges) if a < b]
    taken, ends, most = asyncio.run(deliver(pieces, close_after))
    assert taken == sent[: len(taken)]
    assert most <= frames._FRAMES_PER_TURN
    if 0 < close_after <= len(taken):
        assert len(taken) == close_after
        assert not ends
    else:
        assert ends == ["broke"]
        assert len(stream_of(sent[: len(taken) + 1])) > whole or len(taken) == len(sent)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=40))
def test_anything_at_all_ends_a_connection_at_most_once_and_never_the_process(pieces: list[bytes]) -> None:
    _, ends, _ = asyncio.run(deliver(pieces, 0))
    assert len(ends) == 1
