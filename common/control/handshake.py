"""The first frames of a control link, by which its two ends agree on a protocol version. Pure; docs/decisions/0020.

    server -> link      GREETING
    link -> server      versions_frame()
    server -> link      versions_frame()

Version 16 knows nothing of this: its server sends a shorter greeting, and its link begins with other messages.
"""

from __future__ import annotations

from typing import cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from common.base.errors import ProtocolError
from common.control.codec import Unpacked, split
from common.control.versions import OURS, Versions

GREETING = b"\xdd\0\0\0\0"
"""An empty array in its longest form, which version 16 reads like its own greeting."""
_GREETING_OF_16 = b"\x90"
_HANDSHAKE = 0
"""The version in the envelope of `Versions`, which every version understands."""


def versions_frame() -> bytes:
    """The frame that tells the other end which versions this one speaks."""
    return cast("bytes", msgpack.packb([[_HANDSHAKE, "Versions", OURS]]))  # pyright: ignore[reportUnknownMemberType]


def versions_in(envelope: Unpacked) -> Versions | None:
    """The versions that the other end speaks; None if this is another message. Later versions may add items.

    Raises: ProtocolError if it is malformed.
    """
    match envelope:
        case [0, "Versions", [int(oldest), int(newest), *_]] if oldest <= newest:
            return Versions(oldest, newest)
        case [0, *_]:
            raise ProtocolError("malformed protocol versions")
        case _:
            return None


def server_versions(frame: bytes | bytearray) -> Versions | None:
    """What a server's frame says before a version is agreed on; None: it waits for the versions of this end.

    Raises: ProtocolError for any other frame.
    """
    if frame == GREETING:
        return None
    if frame == _GREETING_OF_16:
        return Versions(16, 16)
    envelopes = split(frame)
    theirs = versions_in(envelopes[0]) if envelopes else None
    if theirs is None:
        raise ProtocolError("it does not say which protocol versions it speaks")
    return theirs
