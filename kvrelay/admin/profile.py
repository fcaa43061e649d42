"""`kvrelay admin profile`: records what a service computes, to a file for Perfetto."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from common.base.files import write_whole
from kvrelay.admin.client import AdminClient
from kvrelay.admin.options import Json, Url, check_output, file_name, said_if_slow, show_answer

_EXTRA_S = 60.0
"""Time for the profiler's start and for sending the trace: a busy node's has some hundred megabytes before compression."""


def profile(
    name: Annotated[str, typer.Argument(metavar="ID", help="A node's id; `router` is the router that is asked.")],
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, max=60.0, help="Duration.")] = 5.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default profile-ID-TIME.json.gz.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Record what a service does: operations of PyTorch and the stacks of its threads, to a file that Perfetto opens.

    Steps go on, a little slower.
    """

    def act(client: AdminClient) -> dict[str, str]:
        base = client.url if name == "router" else client.address_of(client.node(name))
        client.get("/config", base=base)  # fails at once if the service is stopped, instead of waiting
        stamp = time.strftime("%Y%m%d-%H%M%S")
        file = output or Path(f"profile-{file_name(name)}-{stamp}.json.gz")
        check_output(file)
        with said_if_slow(f"recording {name} for {seconds:g} s"):
            write_whole(file, client.post("/profile", {"seconds": seconds}, base=base, timeout_s=seconds + _EXTRA_S))
        return {"file": str(file)}

    show_answer(
        url,
        as_json,
        act,
        lambda show, answer: show.cell(f"{answer['file']}: open it at https://ui.perfetto.dev (stays in the browser)"),
    )
