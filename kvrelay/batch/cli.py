"""`kvrelay batch`: the requests of a file, with their results in another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from common.config.cli import CONTEXT_SETTINGS, flowing, run_checked
from common.config.sources import ENV_PREFIX

_HELP = """Answer a file of requests in OpenAI's batch format.

Each input line has custom_id, method, url and body; each output line has id, custom_id, response and error, in the order
in which the requests end. Run again after an interruption, even kill -9, it does only what has no result yet.

[bold]Running server:[/bold] kvrelay batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000

[bold]Own cluster:[/bold] kvrelay batch -i in.jsonl -o out.jsonl --model ./Qwen2.5-0.5B-Instruct --prefill 1 --decode 2

With --model, a cluster like that of `kvrelay up` runs until the batch is done; KVRELAY_* variables and KVRELAY_CONFIG set
its other options.

Exit codes: 0 every request was answered, 1 some failed, 2 wrong usage or a wrong file, 3 no server, 78 wrong configuration.
"""


_file = partial(typer.Option, rich_help_panel="Files")
_server = partial(typer.Option, rich_help_panel="Server")
_cluster = partial(typer.Option, rich_help_panel="Own cluster")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command("batch", help=flowing(_HELP), context_settings=CONTEXT_SETTINGS)
def batch(
    input_file: Annotated[
        Path, _file("--input-file", "-i", help="Requests, one JSON object per line.", metavar="FILE")
    ],
    output_file: Annotated[
        Path, _file("--output-file", "-o", help="Results; those already there are kept.", metavar="FILE")
    ],
    url: Annotated[
        str | None, _server(help="Server URL; by default that of this user's only `kvrelay up`, else port 8000.")
    ] = None,
    api_key: Annotated[str, _server(help="Bearer token.", envvar=ENV_PREFIX + "API_KEY")] = "",
    concurrency: Annotated[int, _server(help="Maximum number of requests at once.", min=1, max=1024)] = 32,
    attempts: Annotated[
        int, _server(help="Attempts per request after 429, 502, 503 or a lost connection.", min=1)
    ] = 10,
    timeout: Annotated[float, _server(help="Maximum seconds per attempt.", min=0.001)] = 600.0,
    model: Annotated[str | None, _cluster(help="Start a cluster for this model, as `kvrelay up` does.")] = None,
    prefill: Annotated[int, _cluster(help="Prefill nodes to run.", min=0)] = 1,
    decode: Annotated[int, _cluster(help="Decode nodes to run.", min=1)] = 1,
) -> None:
    if url is not None and model is not None:
        raise typer.BadParameter("--url names a running server, --model starts one: give one of them")
    cluster = None if model is None else ["--model", model, "--prefill", str(prefill), "--decode", str(decode)]

    def act() -> None:
        from kvrelay.batch.runner import run_batch

        run_batch(
            input_file,
            output_file,
            url=url,
            cluster=cluster,
            api_key=api_key,
            concurrency=concurrency,
            attempts=attempts,
            timeout_s=timeout,
        )

    run_checked(act)
