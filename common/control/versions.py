"""Protocol versions: those that this code speaks, what two ends agree on, and what an older end is not sent. Pure.

docs/decisions/0020 says why, and how a field is added. Types name their newer fields themselves:

    preemptions: Annotated[int, Since(17)] = 0
"""

from __future__ import annotations

from dataclasses import MISSING, Field, is_dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from common.base.errors import ProtocolError
from common.base.message_types import Since

PROTOCOL_VERSION = 17
"""Version of control messages, records and data headers. It also changes when the byte order of payloads changes."""
OLDEST_VERSION = 16
"""The oldest version that is still spoken: the one before, so that a cluster can be upgraded one service at a time."""


class Versions(NamedTuple):
    """The protocol versions that one end speaks, as a range."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def common(self, theirs: Versions) -> int:
        """The newest version that both ends speak. Raises: ProtocolError if there is none."""
        version = min(self.newest, theirs.newest)
        if version not in self or version not in theirs:
            raise ProtocolError(f"no protocol version in common: theirs is {theirs}, ours is {self}")
        return version


OURS = Versions(OLDEST_VERSION, PROTOCOL_VERSION)


def as_of(value: Any, version: int) -> Any:
    """Convert a message, or a part of one, to the fields of an older `version`; what has no newer field is not copied.

    Raises: ProtocolError for a needed field that is newer.
    """
    cls = cast("type[Any]", type(value))
    if cls is list or cls is tuple:
        return [as_of(item, version) for item in value]
    if cls is dict:
        return {key: as_of(item, version) for key, item in value.items()}
    if not has_newer(cls, version):
        return value
    kept: dict[str, Any] = {}
    for name, hint in fields_of(cls).items():
        since, item = since_of(hint), getattr(value, name)
        if since is None or since.version <= version:
            kept[name] = as_of(item, version)
        elif since.needed and item != _default(cls, name):
            raise ProtocolError(
                f"{cls.__name__}.{name} needs protocol version {since.version}; the other end speaks {version}"
            )
    return list(kept.values()) if issubclass(cls, tuple) else kept


@cache
def fields_of(cls: type[Any]) -> dict[str, Any]:
    """The fields of a message type with their types, in order; none for other types."""
    if not (is_dataclass(cls) or hasattr(cls, "_fields")):
        return {}
    return get_type_hints(cls, include_extras=True)


@cache
def has_newer(cls: type[Any], version: int) -> bool:
    """Whether values of this type can have fields that are newer than `version`."""
    return any(_is_newer(hint, version) for hint in fields_of(cls).values())


def since_of(hint: Any) -> Since | None:
    """The mark of a field that was added later."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Since)), None)


def _is_newer(hint: Any, version: int) -> bool:
    since = since_of(hint)
    if since is not None and since.version > version:
        return True
    inner = get_args(hint)
    return (
        any(_is_newer(part, version) for part in inner)
        if inner
        else isinstance(hint, type) and has_newer(hint, version)
    )


def _default(cls: type[Any], name: str) -> Any:
    """The default of a field; every field that is added later has one."""
    if issubclass(cls, tuple):
        return cast("dict[str, Any]", cls._field_defaults)[name]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    field = cast("dict[str, Field[Any]]", cls.__dataclass_fields__)[name]
    return field.default if field.default_factory is MISSING else field.default_factory()
