"""`kvrelay chat`: a chat in the terminal with any server of the OpenAI API."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any, cast

import typer

from common.base.sentences import counted
from common.config.cli import CONTEXT_SETTINGS, flowing, run_checked
from common.config.sources import ENV_PREFIX

_HELP = """Chat with a running server. Answers are shown as they come.

/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer. From a pipe, each line of standard input is
a message, and standard output has the answers only.

[bold]Examples:[/bold] kvrelay chat --system 'Answer in one sentence.' --temperature 0

  echo 'What is the capital of France?' | kvrelay chat --temperature 0

Exit codes: 0 done, 1 an answer failed (from a pipe), 2 wrong usage, 3 no server.
"""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command("chat", help=flowing(_HELP), context_settings=CONTEXT_SETTINGS)
def chat(
    url: Annotated[
        str | None, typer.Option(help="Server URL; by default that of this user's only `kvrelay up`, else port 8000.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; by default the first that the server lists.")] = None,
    api_key: Annotated[str, typer.Option(help="Bearer token.", envvar=ENV_PREFIX + "API_KEY")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="By default the model's; 0 is greedy.", min=0.0, max=2.0)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="By default the model's.", min=0.0, max=1.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens of an answer.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; by default a new one for each answer.")] = None,
    timeout: Annotated[float, typer.Option(help="Maximum seconds to wait for the next token.", min=0.001)] = 600.0,
) -> None:
    fields = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in fields.items() if value is not None}
    run_checked(lambda: _chat(url, model, api_key, system, given, timeout))


def _chat(
    url: str | None, model: str | None, api_key: str, system: str, fields: dict[str, Any], timeout_s: float
) -> None:
    from kvrelay.admin.client import AdminUsage
    from kvrelay.chat.session import ChatSession
    from kvrelay.chat.stream import ChatClient, ChatFailed
    from kvrelay.served_models import base_url, default_url, list_models

    url = base_url(url or default_url())
    models = list_models(url, api_key)
    if model is not None and model not in models:
        raise AdminUsage(f"{url} has no model {model!r}, it has {', '.join(models)}")
    cast("io.TextIOWrapper", sys.stdin).reconfigure(errors="replace")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with ChatClient(url, api_key, timeout_s=timeout_s) as client:
        body = {"model": model or next(iter(models)), **fields}
        session = ChatSession(client.stream, body, system=system, interactive=interactive)
        session.run(_read_terminal() if interactive else _read_pipe)
    if session.failed and not interactive:
        raise ChatFailed(f"{counted(session.failed, 'message has/messages have')} no whole answer")


def _read_terminal() -> Callable[[str], str]:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing and a history
    return input


def _read_pipe(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
