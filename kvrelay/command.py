"""The command `kvrelay`: one subcommand per service and tool, found through the entry-point group `kvrelay.commands`.

It imports none of them: a subcommand is loaded when it is used, so that `kvrelay --help` is quick.
"""

from __future__ import annotations

import os
import sys
import tomllib
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from common.base.errors import ConfigError
from common.base.process import end_process, open_standard_streams
from common.config.cli import CONTEXT_SETTINGS, flowing

ENTRY_POINT_GROUP = "kvrelay.commands"
_ORDER = ["up", "serve", "chat", "batch", "router", "prefill", "decode", "admin", "load", "simulate", "keys", "cache"]

_HELP = """Serve a large language model with prefill and decode on separate nodes.

A router serves the OpenAI API and sends each prompt to a prefill node, which computes its KV cache and relays it,
layer by layer, to a decode node that generates the answer. Services find each other through Redis.

[bold]Try it:[/bold] kvrelay up (a whole cluster on this machine, with a small demo model)

[bold]Your model:[/bold] kvrelay up --model Qwen/Qwen2.5-0.5B-Instruct --prefill 1 --decode 2

[bold]Many hosts:[/bold] run kvrelay router, kvrelay prefill and kvrelay decode with the same --redis-url and --cluster.

[bold]Use it:[/bold] kvrelay chat, kvrelay batch -i in.jsonl -o out.jsonl

[bold]Inspect and measure:[/bold] kvrelay admin nodes, kvrelay load run --rate 5 --duration 30

Every option can also be set by the environment variable shown beside it, or in a TOML file (--config FILE): at its
top level for all services, or in a table \\[router] \\[prefill] \\[decode] \\[up] for one. Flags override the environment,
which overrides the file.

Exit codes of services: 0 stopped normally, 1 failed, 2 wrong usage, 75 an operator asked for a restart, 78 wrong
configuration. The --help of other commands lists theirs.
"""


class _CommandGroup(typer.core.TyperGroup):
    """The subcommands of the installed distributions, each imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = set(commands())
        return [name for name in _ORDER if name in names] + sorted(names - set(_ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = commands().get(cmd_name)
        return None if entry is None else typer.main.get_command(entry.load())


def commands() -> dict[str, EntryPoint]:
    """The subcommands of all installed distributions, and in a source tree those in its pyproject.toml.

    An older installation of the source tree may not list its newest subcommands.
    """
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    project = Path(__file__).parent.parent / "pyproject.toml"
    if not project.exists():
        return installed
    declared = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"][ENTRY_POINT_GROUP]
    return {**{name: EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in declared.items()}, **installed}


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"kvrelay {version('kvrelay')}")
        except PackageNotFoundError:
            print("kvrelay (not installed, running from its source)")
        raise typer.Exit


app = typer.Typer(cls=_CommandGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback(help=flowing(_HELP), context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _check_working_folder() -> None:
    """End the process if its working folder was deleted: libraries fail later, with messages that say nothing of it."""
    try:
        os.getcwd()
    except OSError as error:
        print(f"kvrelay: cannot use the working folder: {error.strerror}; change to another one", file=sys.stderr)
        end_process(ConfigError.exit_code)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    open_standard_streams()
    _check_working_folder()
    try:
        app(prog_name="kvrelay")
    except SystemExit as end:
        end_process(end.code)
