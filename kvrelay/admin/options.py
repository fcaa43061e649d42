"""Options that the commands of `kvrelay admin` share, and how they fetch and print an answer."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from common.base.errors import ConfigError, KvRelayError
from common.config.cli import IO_ERROR, check_writable
from common.config.sources import ADMIN_URL_VARIABLE
from kvrelay.admin.client import AdminClient, AdminIncomplete, connect

_SLOW_S = 2.0


class AdminNotWritten(KvRelayError):
    """A file of the command cannot be written."""

    exit_code = IO_ERROR


def check_output(file: Path) -> None:
    """Check, before anything is asked, that a file can be written. Raises: AdminNotWritten."""
    try:
        check_writable(file)
    except ConfigError as error:
        raise AdminNotWritten(error.message) from None


def check_text(text: str | None) -> str | None:
    """Raises: BadParameter for bytes of the command line that are not UTF-8, which Python shows as lone surrogates."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not valid UTF-8") from None
    return text


def check_seconds(value: float) -> float:
    """Check a duration. Raises: BadParameter."""
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a number of seconds")
    return value


def seconds_option(name: str, help: str) -> Any:
    """The option `name` for a duration."""
    return typer.Option(name, metavar="S", callback=check_seconds, help=help)


Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar=ADMIN_URL_VARIABLE,
        help="Admin address of a router, or of several, separated by commas.",
    ),
]
StartTimeout = Annotated[float, seconds_option("--start-timeout", "Seconds for a service to be usable again.")]
Everything = Annotated[bool, typer.Option("--all", help="Show everything that the router and the node report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the full response as JSON.")]
NodeName = Annotated[str, typer.Argument(metavar="ID", help="Node id or incarnation, or a unique prefix of it.")]


def show_answer(
    url: str | None, as_json: bool, fetch: Callable[[AdminClient], Any], render: Callable[[Any, Any], Any]
) -> None:
    """Fetch an answer with a client; print it as JSON or as `render(show, answer)`.

    Of an incomplete answer, the known part is printed before the command fails.
    """
    try:
        answer = fetch(connect(url, os.environ))
    except AdminIncomplete as error:
        print_answer(error.answer, as_json, render)
        raise
    print_answer(answer, as_json, render)


def file_name(name: str) -> str:
    """A service's name as part of a file's name: a node may have registered any."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "-"


def say(line: str) -> None:
    """One line about what the command does, on standard error."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def said_if_slow(line: str) -> Generator[None]:
    """Print `line` if the block takes more than `_SLOW_S`."""
    timer = threading.Timer(_SLOW_S, say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_answer(answer: Any, as_json: bool, render: Callable[[Any, Any], Any]) -> None:
    """Print an answer as JSON or as `render(show, answer)`."""
    if as_json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    from kvrelay.admin import show

    show.console().print(render(show, answer))
