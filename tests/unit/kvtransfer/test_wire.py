"""What the data plane's header check lets through."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest

from common.base.errors import ProtocolError
from common.base.hashing import HASH_BYTES
from common.control.messages import AttemptKey
from common.control.versions import OLDEST_VERSION, OURS, PROTOCOL_VERSION
from kvtransfer.wire import (
    MAX_BLOCKS,
    MAX_HEADER_BYTES,
    MAX_SLICES,
    KVSlice,
    SliceAck,
    SliceHeader,
    decode_ack,
    decode_header,
    encode,
)

HEADER = SliceHeader(
    key=AttemptKey("r", 1),
    src_incarnation="s",
    dst_incarnation="d",
    src_rank=0,
    dst_rank=1,
    sequence=7,
    slices=[KVSlice(0, 0, 2, 0, 1, 3, 5)],
    first_block=3,
    block_hashes=bytes(2 * HASH_BYTES),
)


def test_header_and_ack_survive_the_wire() -> None:
    ack = SliceAck(AttemptKey("r", 1), 7, "corrupt_slice", "why")
    assert decode_header(memoryview(encode(HEADER))) == HEADER
    assert decode_ack(encode(ack)) == ack


@pytest.mark.parametrize(
    "changed",
    [
        {"slices": []},
        {"slices": [KVSlice(0, 0, 2, 0, 1, 2, 5)]},
        {"slices": [KVSlice(0, 0, 2, 0, 1, 3, 6)]},
        {"slices": [KVSlice(0, 0, 2, 0, 1, 5, 3)]},
        {"slices": [KVSlice(-1, 0, 2, 0, 1, 3, 5)]},
        {"slices": [KVSlice(0, -1, 2, 0, 1, 3, 5)]},
        {"slices": [KVSlice(0, 0, 2**40, 0, 1, 3, 5)]},
        {"block_hashes": bytes(HASH_BYTES + 1)},
        {"block_hashes": bytes(MAX_HEADER_BYTES)},
        {"sequence": -1},
        {"src_incarnation": "x" * 10_000},
        {"key": AttemptKey("r", "one")},  # type: ignore[arg-type]
        {"dst_rank": None},
    ],
)
def test_malformed_header_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode_header(encode(dataclasses.replace(HEADER, **changed)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        bytes(MAX_HEADER_BYTES + 1),
        msgpack.packb([PROTOCOL_VERSION + 1, "SliceHeader", {}]),
        msgpack.packb([PROTOCOL_VERSION, "Abort", {}]),
        msgpack.packb([PROTOCOL_VERSION, "SliceHeader", []]),
        msgpack.packb([PROTOCOL_VERSION, ["SliceHeader"], {}]),
        b"\x91" * 5000,
        encode(SliceAck(AttemptKey("r", 1), 7)),
    ],
)
def test_bytes_that_are_no_header_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(data)


def test_header_of_a_version_that_is_not_spoken_is_refused_naming_both() -> None:
    """Another version may order the bytes of a payload in another way, which no other check would notice."""
    theirs = msgpack.packb([OLDEST_VERSION - 1, "SliceHeader", {}])
    with pytest.raises(ProtocolError, match=f"theirs is {OLDEST_VERSION - 1}, ours is {OURS}"):
        decode_header(theirs)


def test_longest_transfer_can_name_all_its_blocks_in_one_message() -> None:
    """As the message at the seam of two layers does: the end of one, the beginning of the next."""
    slices = [KVSlice(0, 0, 1, 0, 1, MAX_BLOCKS - 1, MAX_BLOCKS), KVSlice(0, 1, 2, 0, 1, 0, 1)] * (MAX_SLICES // 2)
    hashes = bytes(MAX_BLOCKS * HASH_BYTES)
    longest = dataclasses.replace(HEADER, slices=slices, first_block=0, block_hashes=hashes)
    assert decode_header(encode(longest)) == longest
    assert MAX_BLOCKS * 16 > 1_000_000, "tokens"
