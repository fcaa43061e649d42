"""`kvrelay admin watch`: a live table of the cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Annotated, Any

import typer

from kvrelay.admin.client import AdminClient, AdminRefused, AdminUnreachable, AdminUsage, connect
from kvrelay.admin.options import Url

_SHOWN = 10
"""Most running requests that are listed."""


def watch(
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.2, max=86_400.0, help="Seconds between two looks.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="End after N views; by default at Ctrl-C.")
    ] = None,
    url: Url = None,
) -> None:
    """Show nodes and running requests, renewed each second. Where output is piped, one table after the other."""
    from rich.live import Live

    from kvrelay.admin import show

    console = show.console()
    client = connect(url, os.environ)
    view = show.overview(*_look(client))  # a cluster that does not answer at first is an error
    live = Live(view, console=console, auto_refresh=False) if console.is_terminal else None

    def display(shown: Any) -> None:
        if live is None:
            console.print(shown)
        else:
            live.update(shown, refresh=True)

    with live or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
        display(view)
        for _ in itertools.count(1) if count is None else range(1, count):
            time.sleep(interval_s)
            try:
                client = _connect_again(url, client.url)
                shown = view = show.overview(*_look(client))
            except (AdminUnreachable, AdminRefused, AdminUsage) as error:
                shown = show.Group(view, show.cell(error.message))
            display(shown)


def _connect_again(url: str | None, before: str) -> AdminClient:
    """Find the cluster again, which may have restarted elsewhere. If others have started meanwhile, use the address `before`."""
    try:
        return connect(url, os.environ)
    except AdminUsage:
        return connect(before, os.environ)


def _look(client: AdminClient) -> tuple[Any, Any, list[dict[str, Any]]]:
    requests = client.get(f"/requests?limit={_SHOWN}")["requests"]
    running = [summary for summary in requests if summary["outcome"] == "running"]
    return client.get("/status"), client.get("/nodes"), running
