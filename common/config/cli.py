"""The commands of services, built from their configuration classes, and what all commands of `kvrelay` have in common.

Flags, help, environment variables and TOML keys come from the same fields, so they always agree. Importing this module
or a service's `cli` module is quick and loads neither torch nor a web framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
import typer.core

from common.base import logs
from common.base.errors import ConfigError, KvRelayError, RestartRequested
from common.base.process import die_with_parent
from common.config.fields import field_infos, flag
from common.config.service_configs import ServiceConfig
from common.config.sources import (
    BOOLEANS,
    CONFIG_FILE_VARIABLE,
    ENV_PREFIX,
    SUPERVISOR_VARIABLE,
    UNSET,
    Resolved,
    field_types,
    resolve,
    type_label,
)

log = logging.getLogger(__name__)


class HelpRow(NamedTuple):
    """One option."""

    group: str
    names: str
    """The option's flags and the type of its value, such as `--port INTEGER`."""
    help: str
    variable: str = ""
    default: str = ""


def help_text(usage: str, description: str, rows: Iterable[HelpRow], width: int) -> str:
    """The whole help: usage, description, then each group under its name, in the order of their first options."""
    plain = re.sub(r"\[/?bold\]", "", description).strip()
    paragraphs = [textwrap.fill(" ".join(part.split()), width) for part in plain.split("\n\n")]
    groups: dict[str, list[HelpRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    blocks = [_group(name, members, width) for name, members in groups.items()]
    return "\n\n".join([usage.strip(), *paragraphs, *blocks]) + "\n"


def _group(name: str, rows: Sequence[HelpRow], width: int) -> str:
    lines = [name, "-" * len(name)]
    for row in rows:
        more = [row.variable, f"default: {row.default}" if row.default else ""]
        told = "; ".join(each for each in more if each)
        text = f"{row.help} [{told}]" if told else row.help
        wrap = textwrap.TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False)
        wrap.break_on_hyphens = False
        lines += [f"  {row.names}", *wrap.wrap(text)]
    return "\n".join(lines)


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""Settings of every command."""
_APP_SETTINGS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "rich"}

_NO_ROOM, IO_ERROR = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}, 74
"""Write errors that are not a bug of ours, and the exit code after one."""

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)
ResultT = TypeVar("ResultT")
_CONFIG = "--config"
_NOTES = "kvrelay.notes"
"""Key of what `translate` tells, in the command's context."""


class Translated(NamedTuple):
    """Words of another server's command line as ours."""

    words: list[str]
    notes: list[str]
    """What to log: options without an effect."""


Translate = Callable[[Sequence[str], set[str], set[str]], Translated]
"""(words, our flags that need no value, our flags that are lists) -> ours. Raises: ConfigError."""


def _command_class(
    rows: Sequence[HelpRow], aliases: dict[str, str], switches: set[str], lists: set[str], translate: Translate | None
) -> type[typer.core.TyperCommand]:
    """A command whose help has `rows`, and that also accepts the spellings of other servers, after `translate`.

    These are `aliases` of our flags, `_` for `-` in any flag, for `switches` (flags whose value is true, false or none)
    `--x` for `--x true` and `--no-x` for `--x false`, and for `lists` `--x a b` or `--x a --x b` for `--x a,b`.
    """

    class Command(typer.core.TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if translate is not None:
                args, ctx.meta[_NOTES] = run_checked(partial(translate, args, switches, lists))
            ours = _with_lists([_our_spelling(arg, aliases) for arg in args], lists)
            after = ours[1:] + [""] * bool(ours)
            return super().parse_args(ctx, [_switched(*pair, switches) for pair in zip(ours, after, strict=True)])

        def format_help(self, ctx: Any, formatter: Any) -> None:
            formatter.write(help_text(ctx.get_usage(), self.help or "", rows, formatter.width))

    return Command


def _our_spelling(arg: str, aliases: dict[str, str]) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    name = name.replace("_", "-")
    return aliases.get(name, name) + equals + value


def _switched(arg: str, after: str, switches: set[str]) -> str:
    if arg in switches and after.lower() not in (*BOOLEANS, UNSET):
        return arg + "=true"
    if arg.startswith("--no-") and "--" + arg[5:] in switches:
        return f"--{arg[5:]}=false"
    return arg


def _with_lists(args: list[str], lists: set[str]) -> list[str]:
    """The values of each flag in `lists` joined by commas into one word."""
    out: list[str] = []
    values: dict[str, list[str]] = {}
    current: list[str] | None = None
    for arg in args:
        name, equals, value = arg.partition("=")
        if name in lists:
            current = values.setdefault(name, [])
            if equals:
                current.append(value)
        elif current is not None and not arg.startswith("-"):
            current.append(arg)
        else:
            current = None
            out.append(arg)
    return out + [f"{name}={','.join(given)}" if given else name for name, given in values.items()]


def flowing(text: str) -> str:
    """Join the lines of each paragraph, so that a terminal can wrap them at its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def service_app(
    cls: type[ConfigT],
    *,
    help: str,
    run: Callable[[Resolved[ConfigT]], None],
    name: str = "",
    argument: str = "",
    translate: Translate | None = None,
) -> typer.Typer:
    """A Typer application with one command whose options are the fields of `cls`.

    `name`: that of the command; by default the service's. `argument`: the field that is given without a flag. `translate`: for
    the command line of another server.

    `run` gets the resolved configuration, after logging is set up. A `ConfigError` ends the process with one sentence
    on standard error, a log line if the log is JSON, and exit code 78, any other `KvRelayError` with its `exit_code`.
    """

    def command(ctx: typer.Context, config: str | None, **given: str | None) -> None:
        flags = {name: value for name, value in given.items() if value is not None}
        run_checked(lambda: _start(cls, flags, config, run, ctx.meta.get(_NOTES, [])))

    infos = field_infos(cls)
    annotations: dict[str, Any] = {"ctx": typer.Context, "config": Annotated[str | None, typer.Option(_CONFIG)]}
    for field in infos:
        shown = typer.Argument(metavar=field.upper()) if field == argument else typer.Option(flag(field))
        annotations[field] = Annotated[str | None, shown]
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for each, annotation in annotations.items()
        ]
    )
    aliases = {alias: flag(each) for each, info in infos.items() for alias in info.aliases}
    switches = {flag(each) for each in infos if type_label(field_types(cls)[each]) == "BOOLEAN"}
    lists = {flag(each) for each, info in infos.items() if info.several}
    command_class = _command_class(_help_rows(cls, argument), aliases, switches, lists, translate)
    app = typer.Typer(**_APP_SETTINGS)
    app.command(name or cls.section, help=flowing(help), cls=command_class, context_settings=CONTEXT_SETTINGS)(command)
    return app


def _start(
    cls: type[ConfigT],
    flags: dict[str, str],
    file: str | None,
    run: Callable[[Resolved[ConfigT]], None],
    notes: Iterable[str],
) -> None:
    die_with_parent()
    resolved = resolve(cls, flags=flags, environ=os.environ, file=file)
    if file is not None:
        os.environ[CONFIG_FILE_VARIABLE] = file  # the services that `kvrelay up` starts read it too
    logs.configure(resolved.config.log_level, resolved.config.log_format)
    for note in notes:
        log.info("%s", note)
    if resolved.ignored and SUPERVISOR_VARIABLE not in os.environ:
        log.info("ignored variables that a cluster sets for its services: %s", ", ".join(resolved.ignored))
    try:
        run(resolved)
    except KvRelayError as error:
        if resolved.config.log_format == "text":
            raise
        log.log(logging.WARNING if isinstance(error, RestartRequested) else logging.ERROR, "%s", error)
        raise typer.Exit(error.exit_code) from None


def run_checked(action: Callable[[], ResultT]) -> ResultT:
    """Run `action` and return its result. If it raises a `KvRelayError`, end the process with one sentence and the error's exit code."""
    try:
        return action()
    except KvRelayError as error:
        sys.stdout.flush()
        print(f"kvrelay: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        with contextlib.suppress(OSError):
            where = f" {error.filename}" if error.filename else ""
            print(f"kvrelay: cannot write{where}: {error.strerror}", file=sys.stderr, flush=True)
        raise typer.Exit(IO_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def check_writable(path: Path) -> None:
    """Check, before a long run, that its results can be written to this file. Raises: ConfigError."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: {path.parent} is not a folder")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'permission denied'}")


def _help_rows(cls: type[ServiceConfig], argument: str) -> list[HelpRow]:
    """The help of each option. `argument`: the field that is given without a flag."""
    rows = [
        HelpRow("General", "-h, --help", "Show this text."),
        HelpRow("General", f"{_CONFIG} FILE", "TOML file to read options from.", CONFIG_FILE_VARIABLE),
    ]
    for field in dataclasses.fields(cls):
        info, name = field_infos(cls)[field.name], field.name
        also = f" Also {', '.join(info.aliases)}." if info.aliases else ""
        shown = name.upper() if name == argument else f"{flag(name)} {type_label(field_types(cls)[name])}"
        default = "" if field.default is None else str(field.default)
        rows.append(HelpRow(info.group, shown, info.help + also, ENV_PREFIX + name.upper(), default))
    return rows


class _CheckedGroup(typer.core.TyperGroup):
    """A command with subcommands, which run in `run_checked`."""

    def invoke(self, ctx: Any) -> Any:
        return run_checked(partial(super().invoke, ctx))


def command_group(name: str, help: str) -> typer.Typer:
    """The app of a command with subcommands: `kvrelay NAME COMMAND`. Errors of the commands end the process as in `run_checked`."""
    return typer.Typer(
        name=name,
        cls=_CheckedGroup,
        help=flowing(help),
        no_args_is_help=True,
        context_settings=CONTEXT_SETTINGS,
        **_APP_SETTINGS,
    )
