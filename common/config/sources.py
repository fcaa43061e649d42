"""Reads a configuration: defaults < TOML file < environment < flags. Every mistake is a `ConfigError`.

Pure except for reading the TOML file; runs once, in the main thread, before anything else.

    # kvrelay.toml
    cluster = "lab"            # top level: for every service that has the option
    [decode]                   # tables [router] [prefill] [decode] [up]: for that service only
    max_num_seqs = 32
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from common.base.errors import ConfigError
from common.base.variables import CACHE, CPU_KERNELS, STRICT_STATES
from common.config.fields import field_infos, flag
from common.config.service_configs import SERVICES, ServiceConfig

ENV_PREFIX = "KVRELAY_"
CONFIG_FILE_VARIABLE = "KVRELAY_CONFIG"
SUPERVISOR_VARIABLE = "KVRELAY_SUPERVISOR_PID"
"""Set by a supervisor for its children: the kernel kills them when that process dies."""
ADMIN_URL_VARIABLE = "KVRELAY_ADMIN_URL"
"""Admin URL of the router that `kvrelay admin` asks."""
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""Spellings of true and false in flags and variables."""
UNSET = "none"
"""Spelling of an optional value that is left out."""
_RESERVED_VARIABLES = {CONFIG_FILE_VARIABLE, SUPERVISOR_VARIABLE, ADMIN_URL_VARIABLE, CACHE, CPU_KERNELS, STRICT_STATES}

_SERVICE_LINK = re.compile(
    r"KVRELAY(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for a Service named `kvrelay` or `kvrelay-...`."""
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S*")
"""Value of the Service's `..._PORT`, whose name may also be that of an option."""

Source = Literal["default", "file", "table", "environment", "flag"]
"""Where a value comes from; `file` is the file's top level, `table` the service's own table in it."""

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


@dataclass(frozen=True)
class Resolved(Generic[ConfigT]):
    """A configuration, and the source of each field's value."""

    config: ConfigT
    sources: dict[str, Source]
    ignored: tuple[str, ...] = ()
    """Environment variables with our prefix that a cluster set, not the user."""


@functools.cache
def field_types(cls: type[ServiceConfig]) -> dict[str, Any]:
    """The declared types of the fields, as objects instead of text."""
    return get_type_hints(cls)


def type_label(expected: Any) -> str:
    """The name of a type in `--help`: `INTEGER`, `itl|balanced|ttft`."""
    inner, _ = _strip_optional(expected)
    if get_origin(inner) is Literal:
        return "|".join(str(choice) for choice in get_args(inner))
    return {int: "INTEGER", float: "NUMBER", bool: "BOOLEAN", str: "TEXT"}[inner]


def resolve(
    cls: type[ConfigT], *, flags: Mapping[str, str], environ: Mapping[str, str], file: str | None
) -> Resolved[ConfigT]:
    """Read the configuration of one service from all sources.

    `flags` contains only the flags that were given, by field name. `file` is the TOML file; None means the one that
    `KVRELAY_CONFIG` names, if any.

    Raises: ConfigError naming the place, the key and the mistake.
    """
    file = file or environ.get(CONFIG_FILE_VARIABLE) or None
    given: list[tuple[str, Any, Source]] = [] if file is None else _from_file(cls, file)
    ours = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX)}
    ignored = {name for name, value in ours.items() if _is_service_link(name, value)}
    for name, text in _from_environment(cls, {name: ours[name] for name in ours.keys() - ignored}).items():
        if name not in flags:  # its variable may then be malformed
            given.append((name, _parse(text, field_types(cls)[name], ENV_PREFIX + name.upper()), "environment"))
    given.extend((name, _parse(text, field_types(cls)[name], flag(name)), "flag") for name, text in flags.items())
    sources: dict[str, Source] = dict.fromkeys(field_infos(cls), "default")
    sources.update((name, source) for name, _, source in given)
    return Resolved(cls(**{name: value for name, value, _ in given}), sources, tuple(sorted(ignored)))


def _from_file(cls: type[ServiceConfig], file: str) -> list[tuple[str, Any, Source]]:
    """The values in the file for `cls`. The keys of the other services are checked too."""
    taken: list[tuple[str, Any, Source]] = []
    services = {service.section: service for service in SERVICES}
    shared = {name for service in SERVICES for name, info in field_infos(service).items() if not info.own}
    top, tables = _read_toml(file)
    for key, value in top.items():
        if key not in shared:
            raise ConfigError(f"{file}: {_unknown_top_level(key, shared)}")
        if key in field_infos(cls):
            taken.append((key, _typed(value, field_types(cls)[key], f"{file}: {key}"), "file"))
    for table, body in tables.items():
        if table not in services:
            raise ConfigError(f"{file}: unknown table [{table}]{suggestion(table, services)}")
        known = field_infos(services[table])
        for key, value in body.items():
            if key not in known:
                raise ConfigError(f"{file}: unknown key {key!r} in [{table}]{suggestion(key, known)}")
            if services[table] is cls:
                taken.append((key, _typed(value, field_types(cls)[key], f"{file}: [{table}] {key}"), "table"))
    return taken


def _read_toml(file: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values at the top level, and the tables. Raises: ConfigError."""
    try:
        document = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    tables = {key: cast("dict[str, Any]", value) for key, value in document.items() if isinstance(value, dict)}
    return {key: value for key, value in document.items() if key not in tables}, tables


def _unknown_top_level(key: str, shared: set[str]) -> str:
    owners = [service.section for service in SERVICES if key in field_infos(service)]
    if owners:
        return f"{key!r} is allowed only in a service's own table; put it into {' or '.join(f'[{o}]' for o in owners)}"
    return f"unknown key {key!r}{suggestion(key, shared)}"


def _is_service_link(variable: str, value: str) -> bool:
    """The variable has the name and value that Kubernetes gives it for the address of a Service."""
    return bool(_SERVICE_LINK.fullmatch(variable)) or (
        variable.endswith("_PORT") and bool(_SERVICE_URL.fullmatch(value))
    )


def _from_environment(cls: type[ServiceConfig], environ: Mapping[str, str]) -> dict[str, str]:
    """Texts of the options of `cls`. `environ`: variables with our prefix that the user set."""
    known = {ENV_PREFIX + name.upper() for service in SERVICES for name in field_infos(service)}
    for variable in environ:
        if variable not in known | _RESERVED_VARIABLES:
            raise ConfigError(f"unknown environment variable {variable}{suggestion(variable, known)}")
    # Compose files set variables without a value to the empty string.
    texts = {name: environ.get(ENV_PREFIX + name.upper(), "") for name in field_infos(cls)}
    return {name: text for name, text in texts.items() if text}


def optional_variable(environ: Mapping[str, str], name: str) -> str | None:
    """Value of the environment variable of option `name`, for commands without a configuration. Like for services, None means
    that it is not set, empty, or `UNSET`."""
    text = environ.get(ENV_PREFIX + name.upper(), "")
    return None if text.lower() in ("", UNSET) else text


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message that names the known word most like `name`; empty if none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _strip_optional(expected: Any) -> tuple[Any, bool]:
    """(`T`, True) for `T | None`, else (`expected`, False)."""
    if get_origin(expected) in (types.UnionType, typing.Union):
        inner = [arg for arg in get_args(expected) if arg is not type(None)]
        return inner[0], True
    return expected, False


def _parse(text: str, expected: Any, place: str) -> Any:
    """Parse the value of a flag or an environment variable."""
    inner, optional = _strip_optional(expected)
    if optional and text.lower() == UNSET:
        return None
    if inner in (int, float):
        try:
            return inner(text)
        except ValueError:
            raise ConfigError(f"{place}: {text!r} is not {_article(inner)}") from None
    if inner is bool:
        if text.lower() not in BOOLEANS:
            raise ConfigError(f"{place}: {text!r} is neither true nor false")
        return BOOLEANS[text.lower()]
    return _typed(text, expected, place)


def _typed(value: Any, expected: Any, place: str) -> Any:
    """Check that a value from a TOML file has the expected type."""
    inner, _ = _strip_optional(expected)
    if get_origin(inner) is Literal:
        choices = get_args(inner)
        if value not in choices:
            near = suggestion(str(value), choices)
            raise ConfigError(f"{place}: {value!r} is not one of {', '.join(choices)}{near}")
        return value
    if inner is float and type(value) is int:
        return float(value)
    if type(value) is not inner:
        raise ConfigError(f"{place}: {value!r} is not {_article(inner)}")
    return value


def _article(inner: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[inner]
