"""Packs and checks messages. They are plain MessagePack, so nothing that is received can run code.

A message is `[version, type name, body]`. The body of a dataclass is a map by field name, that of a named tuple is an array
in the order of its fields. A frame of a control link is an array of messages. `decode` checks version, type, field names
and field types before the rest of the code gets the object; the sockets bound a frame's size before it is allocated.

A new field has a default, is the last one of its type, and names its version: `Annotated[int, Since(17)] = 0`. A message for
an older end leaves it out (`common.control.versions`, docs/decisions/0020).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias, cast, get_args

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from common.base.errors import KvRelayError, ProtocolError
from common.base.message_types import fail_fast
from common.control.item_count import check_item_count
from common.control.messages import Message
from common.control.versions import OURS, PROTOCOL_VERSION, Versions, as_of

MAX_MESSAGE_BYTES = 8 * 2**20
"""A larger control message closes its connection before it is read. A prompt of 1M tokens takes 4 MB."""

_MAX_ITEMS, _MAX_FIELDS = 2**21, 4096
"""Maximum items of a list, and keys of a map. The longest lists are in the steps that a leader sends to its ranks."""
_SMALL_BYTES = 65_536
"""Lists in a frame of up to this size are not counted, because they can take only little memory."""
_LISTS_OF_A_FRAME, _BYTES_PER_LIST = 16_384, 4
"""Maximum lists and maps in a larger frame: the first number, plus one per `_BYTES_PER_LIST` bytes. Frames of control links
have a stricter limit (`common.control.item_count`)."""
MAX_MESSAGES = 1024
"""Maximum number of messages in one frame."""

Unpacked: TypeAlias = "list[Unpacked] | dict[Any, Unpacked] | str | bytes | int | float | None"
"""A MessagePack value in Python."""

# msgpack has no type annotations.
_pack = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def _as_packable(value: object) -> object:
    """Convert a value that MessagePack cannot pack by itself: `Ids` to bytes, a dataclass to a map by field name."""
    return value.tobytes() if isinstance(value, array) else vars(value)


class Codec:
    """Packs and checks the message types of one link.

    Invariant: `decode` returns one of the given types, with every field of its declared type.
    """

    def __init__(self, *types: type[Any], version: int = PROTOCOL_VERSION, spoken: Versions = OURS) -> None:
        """version: that of messages to an end whose version is not known."""
        self._version, self._spoken = version, spoken
        self._validators: dict[str, SchemaValidator] = {
            cls.__name__: SchemaValidator(fail_fast(TypeAdapter(cls).core_schema)) for cls in types
        }

    def encode(self, message: object, version: int | None = None) -> bytes:
        """Pack one message for an end that speaks `version`. Raises: ProtocolError for values that MessagePack cannot represent,
        and for needed fields that an older version lacks."""
        try:
            return self._pack(message, version or self._version)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error

    def _pack(self, message: object, version: int) -> bytes:
        body = message if version == PROTOCOL_VERSION else as_of(message, version)
        return _pack([version, type(message).__name__, body], default=_as_packable)

    def decode(self, data: bytes | memoryview) -> Any:
        """Unpack and check the message in `data`.

        Raises: ProtocolError for anything that is not a well-formed message of a version that is spoken.
        """
        return self.check(unpack(data))

    def check(self, envelope: Unpacked) -> Any:
        """Check the message in an unpacked envelope. Raises: ProtocolError, in the cases of `decode`."""
        if not isinstance(envelope, list) or len(envelope) != 3:
            raise ProtocolError("not a [version, type, body] envelope")
        version, name, body = envelope
        if version not in self._spoken:
            raise ProtocolError(f"protocol version differs: theirs is {version!r:.64}, ours is {self._spoken}")
        validator = self._validators.get(name) if isinstance(name, str) else None
        if validator is None:
            raise ProtocolError(f"unknown message type {str(name)[:64]!r}")
        try:
            return validator.validate_python(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part)[:64] for part in first["loc"])
            raise ProtocolError(f"malformed {name}: {place[:200]}: {first['msg'][:200]}") from error
        except (KvRelayError, ArithmeticError, TypeError) as error:  # a dataclass's own check of its values
            raise ProtocolError(f"malformed {name}: {str(error)[:200]}") from error


def _counting(size_bytes: int) -> Callable[[Any], Any]:
    """Make a hook that ends unpacking at the first list too many. An empty list arrives as one byte, but takes 64."""
    left = itertools.count(_LISTS_OF_A_FRAME + size_bytes // _BYTES_PER_LIST, -1)

    def count(unpacked: Any) -> Any:
        if not next(left):
            raise ValueError("too many lists for its size")
        return unpacked

    return count


def _no_extension(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code}")


def unpack(data: bytes | bytearray | memoryview) -> Unpacked:
    """Unpack the single MessagePack value in `data`. Raises: ProtocolError for anything else."""
    hook = _counting(len(data)) if len(data) > _SMALL_BYTES else None
    try:
        return _unpack(
            data,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_FIELDS,
            list_hook=hook,
            object_hook=hook,
            ext_hook=_no_extension,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not MessagePack: {error}") from error


_CODEC = Codec(*get_args(Message))
decode: Callable[[bytes | memoryview], Message] = _CODEC.decode
check: Callable[[Unpacked], Message] = _CODEC.check
"""Unpack and check a control message, and check one in an envelope from `split`: see `Codec`."""


def encode(message: Message, version: int = PROTOCOL_VERSION) -> bytes:
    """Pack one control message for an end that speaks `version`. Raises: ProtocolError for values that MessagePack cannot
    represent, and for a message that is too large for the other end, or that it cannot understand."""
    data = _CODEC.encode(message, version)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{type(message).__name__} cannot be sent: {len(data)} bytes, at most {MAX_MESSAGE_BYTES}")
    return data


def join(messages: list[bytes]) -> bytes:
    """Join encoded messages to one frame of a control link."""
    count = len(messages)
    head = bytes([0x90 + count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(messages)


def split(frame: bytes | bytearray) -> list[Unpacked]:
    """Split a frame into its envelopes; `check` turns each into a message. Raises: ProtocolError if it is not a frame."""
    check_item_count(frame)
    messages = unpack(frame)
    if not isinstance(messages, list):
        raise ProtocolError("not an array of messages")
    if len(messages) > MAX_MESSAGES:
        raise ProtocolError(f"{len(messages)} messages in one frame, at most {MAX_MESSAGES} are allowed")
    if messages and isinstance(
        messages[0], int
    ):  # before version 3 a frame was one message, which began with its version
        raise ProtocolError(f"protocol version differs: theirs is {messages[0]}, ours is {OURS}")
    return messages
