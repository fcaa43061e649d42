"""Declares an option as a dataclass field: its default, its bounds, its help text and its other names. Pure data.

`common.config.cli` derives flags and help from it, `common.config.sources` environment variables and TOML keys.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from common.base.errors import ConfigError

HIGHEST_PORT = 65535


class Form(NamedTuple):
    """What a text must look like."""

    pattern: str
    """Regular expression that the whole text must match."""
    meaning: str
    """Description for error messages; it follows the words "must be"."""


_HOST = Form(r"(?![^:]*:\d+$)[^\s/@\[\]]+", "a host name or an address, without brackets or a port")
_REACHED_AT = Form(rf"(?!(?:\*|[0.:]+)$){_HOST.pattern}", f"{_HOST.meaning}, and not the one for every interface")
NAME = Form(r"[^{}]+", "a name without braces")
NODE_ID = Form(
    r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}",
    "at most 128 characters: letters, digits and . _ : -, the first one a letter or digit",
)
"""An id may be longer than a host name (64 characters), because the default id contains one."""


@dataclass(frozen=True)
class FieldInfo:
    """Everything about an option that its type and default do not say."""

    help: str
    group: str = "General"
    """Heading in `--help`."""
    low: float | None = None
    high: float | None = None
    aliases: tuple[str, ...] = ()
    """Names of this option in vLLM or SGLang."""
    own: bool = False
    """Whether it is allowed only in a service's own TOML table."""
    secret: bool = False
    """Whether it is never shown; child processes get it in the environment, not on the command line."""
    several: bool = False
    """Whether the value is a list (`listed`); the command line also takes several words, or the flag several times."""
    sets: tuple[str, str] | None = None
    """For `kvrelay up` only: (role, option). The value is passed as this option to each node of this role."""
    form: Form | None = None


def option(default: Any, help: str, *aliases: str, group: str, **more: Any) -> Any:
    """Declare an option. `more`: further fields of its `FieldInfo`."""
    info = FieldInfo(help, group, aliases=aliases, **more)
    return dataclasses.field(default=default, metadata={"info": info})


port_option = partial(option, group="Network", low=0, high=HIGHEST_PORT, own=True)
"""Declare a TCP port to listen on; 0 picks a free one."""
host_option = partial(option, group="Network", own=True, form=_HOST)
"""Declare a host to listen on."""
reached_at_option = partial(option, group="Network", own=True, form=_REACHED_AT)
"""Declare a host at which others reach a service."""


def variant(owner: type, name: str, **changes: Any) -> Any:
    """Declare the option `name` of `owner` once more, with `changes` to its default or `FieldInfo`."""
    original = next(f for f in dataclasses.fields(owner) if f.name == name)
    default = changes.pop("default", original.default)
    info = dataclasses.replace(original.metadata["info"], **changes)
    return dataclasses.field(default=default, metadata={"info": info})


def for_role(role: str, owner: type, name: str, help: str, group: str = "Cluster", **changes: Any) -> Any:
    """Declare an option of `kvrelay up` that sets the option `name` of `owner` for the nodes of one role."""
    return variant(owner, name, group=group, help=help, aliases=(), own=False, sets=(role, name), **changes)


def field_infos(cls: type) -> dict[str, FieldInfo]:
    """The `FieldInfo` of each option, in the order of `--help`."""
    return {f.name: f.metadata["info"] for f in dataclasses.fields(cls)}


def flag(name: str) -> str:
    """The flag of the option `name`."""
    return "--" + name.replace("_", "-")


def listed(name: str, value: str | None) -> list[str]:
    """Split the value of an option that is a list: values separated by commas, or a JSON list of strings. None has no values.

    Raises: ConfigError for an empty value, or for JSON of another form.
    """
    if value is None or not value.strip():
        return []
    parts: list[Any] = value.split(",")
    if value.lstrip().startswith("["):
        try:
            parts = cast("list[Any]", json.loads(value))
        except ValueError as error:
            raise ConfigError(f"{name}: {value!r} is not valid JSON") from error
    if not all(isinstance(part, str) and part.strip() for part in parts):
        raise ConfigError(f"{name}: {value!r} must be a list of names, none of them empty")
    return [part.strip() for part in parts]


def api_keys(value: str) -> tuple[str, ...]:
    """Split the keys of the option `api_key` at its commas. Raises: ConfigError if there are only commas, because without keys
    every client is accepted."""
    keys = tuple(key.strip() for key in value.split(",") if key.strip())
    if value and not keys:
        raise ConfigError("api_key contains no key, only commas or spaces")
    return keys


def check_token(token: str) -> None:
    """Refuse a token that is not valid in an HTTP header, such as one read from a file with its line end.

    Raises: ConfigError, which does not quote the token.
    """
    if not token.isprintable() or token != token.strip():
        raise ConfigError(
            "the admin token contains a line end or another control character, or begins or ends with a space"
        )


def check_bounds(name: str, value: Any, info: FieldInfo) -> None:
    """Check a value against its option. Raises: ConfigError if it is not finite, out of range, of a wrong form, or not UTF-8
    (such a value is not quoted, because it may be secret)."""
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):  # bytes that Python cannot read
        raise ConfigError(f"{name} must be UTF-8")
    if value is None:
        return
    if isinstance(value, str):
        if info.form is not None and not re.fullmatch(info.form.pattern, value):
            raise ConfigError(f"{name} must be {info.form.meaning}, not {value!r}")
        return
    if not (value == value and abs(value) != float("inf")):
        raise ConfigError(f"{name} must be finite, not {value}")
    if info.low is not None and value < info.low:
        raise ConfigError(f"{name} must be at least {info.low:g}, not {value}")
    if info.high is not None and value > info.high:
        raise ConfigError(f"{name} must be at most {info.high:g}, not {value}")
