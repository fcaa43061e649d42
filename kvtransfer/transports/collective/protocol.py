"""Messages and limits that both ends of the collective transport share. Pure.

Headers and acks travel over ZMQ, payloads over a process group, in the same order:

    sender -> receiver    [GroupRequest]   [GroupMeet]   [header, size]   [] as keep-alive   [GroupLeave]
    receiver -> sender    [GroupReply]   [ack]
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from common.base.errors import ConfigError
from common.base.message_types import StrictFields
from common.control.codec import Codec
from common.control.versions import OLDEST_VERSION
from common.engine.kv_transfer import STAGING_BYTES
from kvtransfer import wire
from kvtransfer.transports.base import Buffer, TransportContext
from kvtransfer.transports.choose import NCCL

TIMEOUT_S = 10.0
"""Limit for building a group and for each payload; a peer that takes longer is given up."""
KEEP_ALIVE_S, SILENCE_S = 5.0, 30.0
"""How often a sender sends a keep-alive, and after what silence the receiver leaves its group."""
MAX_GROUPS = 256
WINDOW = 8
"""Maximum number of unacknowledged messages per sender."""
SIZE = struct.Struct("<Q")
"""A payload's size, sent with its header."""
ACK_TAG, GROUP_TAG = b"a", b"g"
"""First byte of what a receiver sends: a `SliceAck` or a `GroupReply` follows."""

_Name = Annotated[str, Field(max_length=256)]


@dataclass(frozen=True)
class GroupRequest(StrictFields):
    """A sender asks for a group called `name`."""

    name: _Name
    backend: _Name
    message_bytes: Annotated[int, Field(gt=0, le=wire.MAX_PAYLOAD_BYTES)]
    """Maximum size of a payload."""
    instead_of: _Name = ""
    """The sender's previous group here, which it has left; over a broken link it could not report that."""


@dataclass(frozen=True)
class GroupMeet(StrictFields):
    """The sender starts to build its end now."""


@dataclass(frozen=True)
class GroupLeave(StrictFields):
    """The sender is closing the connection. A killed sender cannot say so; its silence for `SILENCE_S` does."""


@dataclass(frozen=True)
class GroupReply(StrictFields):
    """The port of the store; or, with an `error`, that there is no group, or that the receiver left it."""

    name: _Name
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    error: Annotated[str, Field(max_length=4096)] = ""


CODEC = Codec(GroupRequest, GroupMeet, GroupLeave, GroupReply, version=OLDEST_VERSION)


def has_room(backend: str, message_bytes: Iterable[int], one_more: int) -> bool:
    """Whether a connection with messages of `one_more` bytes fits beside the present ones, whose sizes are given.

    Staging for NCCL is GPU memory, which is limited to `STAGING_BYTES`.
    """
    return backend != NCCL or WINDOW * (sum(message_bytes) + one_more) <= STAGING_BYTES


def buffer_maker(backend: str, context: TransportContext) -> Callable[[int], Buffer]:
    """Makes buffers, [bytes] of uint8, that `backend` can send from and receive into. Raises: ConfigError."""
    if backend != NCCL:
        return context.make_host_buffer
    if context.device is None:
        raise ConfigError("NCCL needs KV on a CUDA device")
    return context.device.device_buffer
