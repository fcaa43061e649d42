"""What was sealed opens once, at the other end of its channel, and nowhere else."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.bindings import crypto_aead_aegis128l_decrypt

from common.base.errors import ProtocolError
from common.security.sealed_endpoints import NONCE_BYTES, OVERHEAD_BYTES, split_key, with_key, without_keys
from common.security.sealing import Channel, ServerKey, client_channel, password


def ends() -> tuple[Channel, Channel]:
    """Of the client and of the server."""
    server = ServerKey()
    client, channel = client_channel(server.public)
    return channel, server.channel(client)


def test_both_directions_carry_any_content_and_show_none_of_it() -> None:
    client, server = ends()
    for size in (0, 1, 1000, 2**20):
        data = os.urandom(size)
        for one, other in ((client, server), (server, client)):
            frame = one.seal(data)
            assert len(frame) == size + OVERHEAD_BYTES
            assert size < 1000 or not any(
                data[at : at + 16] in frame for at in range(0, size - 16, max(16, size // 50))
            )
            assert other.open(frame) == data


def test_a_frame_is_opened_without_a_further_copy() -> None:
    client, server = ends()
    frame = client.seal(bytes(2**20))
    tracemalloc.start()
    try:
        content = server.open(frame)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(content)
    finally:
        tracemalloc.stop()


@given(st.data())
def test_a_frame_of_which_a_bit_was_changed_does_not_open(data: st.DataObject) -> None:
    client, server = ends()
    frame = bytearray(client.seal(b"content of the frame"))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        server.open(bytes(frame))


@pytest.mark.parametrize("size", [0, 1, NONCE_BYTES, OVERHEAD_BYTES - 1, OVERHEAD_BYTES, OVERHEAD_BYTES + 19])
def test_a_frame_that_was_cut_does_not_open(size: int) -> None:
    client, server = ends()
    whole = client.seal(b"content of the frame")
    for frame in (whole[:size], whole[len(whole) - size :]):
        with pytest.raises(ProtocolError):
            server.open(frame)
    assert server.open(whole) == b"content of the frame"


def test_a_frame_opens_once_and_not_after_a_later_one() -> None:
    client, server = ends()
    first, second = client.seal(b"1"), client.seal(b"2")
    assert server.open(second) == b"2"
    for frame in (first, second):
        with pytest.raises(ProtocolError, match="before"):
            server.open(frame)


def test_a_frame_opens_only_with_its_context_at_the_other_end_of_its_channel() -> None:
    client, server = ends()
    frame, out = bytearray(4 + OVERHEAD_BYTES), bytearray(4)
    client.seal_into(b"data", frame, context=b"header")
    stranger, _ = ends()
    for who, context in (
        (server, b""),
        (server, b"other"),
        (client, b"header"),
        (stranger, b"header"),
        (ends()[1], b"header"),
    ):
        with pytest.raises(ProtocolError, match="not sealed"):
            who.open_into(frame, out, context=context)
    server.open_into(frame, out, context=b"header")
    assert out == b"data"


def test_a_server_that_derives_a_channel_again_uses_no_nonce_twice() -> None:
    server = ServerKey()
    public, client = client_channel(server.public)
    before, again = server.channel(public), server.channel(public)
    frames = [before.seal(b"same") for _ in range(100)] + [again.seal(b"same") for _ in range(100)]
    assert len({frame[-NONCE_BYTES:] for frame in frames}) == 200
    assert [client.open(frame) for frame in frames] == [b"same"] * 200


@pytest.mark.parametrize("public", [b"", b"short", bytes(32), b"\x01" + bytes(31)])
def test_no_channel_is_made_with_a_key_that_gives_no_secret(public: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a public key"):
        client_channel(public)
    with pytest.raises(ProtocolError, match="not a public key"):
        ServerKey().channel(public)


def test_a_password_tells_neither_key() -> None:
    key = ServerKey().public
    assert password(key) == password(key) != password(ServerKey().public)
    assert key.hex().encode() not in password(key)


def test_a_key_fits_into_an_address_and_is_left_out_for_others() -> None:
    key = ServerKey().public
    address = with_key("tcp://10.0.0.1:7", key)
    assert split_key(address) == ("tcp://10.0.0.1:7", key)
    assert without_keys(f"zmq+{address}#gpu shm+unix://x/y") == "zmq+tcp://10.0.0.1:7#gpu shm+unix://x/y"
    assert split_key("tcp://10.0.0.1:7") == ("tcp://10.0.0.1:7", None)
    for wrong in ("zz", "00ff"):
        with pytest.raises(ValueError, match=r"hex|32 bytes"):
            split_key(f"tcp://10.0.0.1:7?key={wrong}")


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4096, 2**20 + 3])
def test_data_is_sealed_and_opened_in_place(size: int) -> None:
    client, server = ends()
    data = os.urandom(size)
    frame = memoryview(bytearray(data + bytes(OVERHEAD_BYTES)))
    client.seal_into(frame[:size], frame, context=b"header")
    server.open_into(frame, frame[:size], context=b"header")
    assert frame[:size] == data


def test_frames_are_what_libsodium_calls_aegis_128l() -> None:
    key, data = os.urandom(16), os.urandom(1001)
    frame = bytearray(len(data) + OVERHEAD_BYTES)
    Channel(key, bytes(16)).seal_into(data, frame, context=b"header")
    sealed, nonce = bytes(frame[:-NONCE_BYTES]), bytes(frame[-NONCE_BYTES:])
    assert crypto_aead_aegis128l_decrypt(sealed, b"header", nonce, key) == data


def test_nothing_is_written_beyond_a_buffer_of_another_size() -> None:
    client, server = ends()
    frame = client.seal(bytes(100))
    for size in (0, 99, 101):
        with pytest.raises(ValueError, match="sealed into"):
            client.seal_into(bytes(100), bytearray(size + OVERHEAD_BYTES))
        with pytest.raises(ProtocolError):
            server.open_into(frame, bytearray(size))
