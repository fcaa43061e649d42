"""`kvrelay batch`: the requests of a file, with their results in another."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from common.base.sentences import counted
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


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


InputFile = Annotated[
    Path, _option("--input-file", "-i", help="Requests, one JSON object per line.", panel="Files", metavar="FILE")
]
ResultFile = Annotated[
    Path, _option("--output-file", "-o", help="Results; those already there are kept.", panel="Files", metavar="FILE")
]
Url = Annotated[
    str | None,
    _option(
        "--url", help="Server URL; by default that of this user's only `kvrelay up`, else port 8000.", panel="Server"
    ),
]
ApiKey = Annotated[str, _option("--api-key", help="Bearer token.", panel="Server", envvar=ENV_PREFIX + "API_KEY")]
Concurrency = Annotated[
    int, _option("--concurrency", help="Maximum number of requests at once.", panel="Server", min=1, max=1024)
]
Attempts = Annotated[
    int,
    _option("--attempts", help="Attempts per request after 429, 502, 503 or a lost connection.", panel="Server", min=1),
]
Timeout = Annotated[float, _option("--timeout", help="Maximum seconds per attempt.", panel="Server", min=0.001)]
Model = Annotated[
    str | None, _option("--model", help="Start a cluster for this model, as `kvrelay up` does.", panel="Own cluster")
]
Prefill = Annotated[int, _option("--prefill", help="Prefill nodes to run.", panel="Own cluster", min=0)]
Decode = Annotated[int, _option("--decode", help="Decode nodes to run.", panel="Own cluster", min=1)]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command("batch", help=flowing(_HELP), context_settings=CONTEXT_SETTINGS)
def batch(
    input_file: InputFile,
    output_file: ResultFile,
    url: Url = None,
    api_key: ApiKey = "",
    concurrency: Concurrency = 32,
    attempts: Attempts = 10,
    timeout: Timeout = 600.0,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
) -> None:
    if url is not None and model is not None:
        raise typer.BadParameter("--url names a running server, --model starts one: give one of them")
    cluster = None if model is None else ["--model", model, "--prefill", str(prefill), "--decode", str(decode)]

    def act() -> None:
        from kvrelay.api_client import ApiClient
        from kvrelay.batch.input_file import BadBatch, check_lines
        from kvrelay.batch.output_file import OutputFile
        from kvrelay.local_cluster import own_key

        custom_ids = check_lines(input_file)
        if output_file.exists() and output_file.samefile(input_file):
            raise BadBatch("the output file must not be the input file")
        key = api_key if cluster is None else own_key(api_key)
        with OutputFile(output_file) as output:
            if foreign := output.finished - custom_ids:
                raise BadBatch(f"{output_file} has a result for {min(foreign)!r}, which {input_file} does not ask for")
            before = len(output.finished)
            if before < len(custom_ids):
                with _server(url, cluster) as address:
                    client = ApiClient(address, key, connections=concurrency, timeout_s=timeout, attempts=attempts)
                    _run(client, input_file, output, concurrency, len(custom_ids))
            _report(output, before)

    run_checked(act)


@contextlib.contextmanager
def _server(url: str | None, cluster: list[str] | None) -> Generator[str]:
    """The URL of the server to ask; with `cluster`, arguments of `kvrelay up`, one that runs until the block ends."""
    from kvrelay.local_cluster import LocalCluster
    from kvrelay.served_models import default_url

    if cluster is None:
        yield url or default_url()
        return
    print(f"kvrelay: starting a cluster: {' '.join(cluster)}", file=sys.stderr, flush=True)
    with contextlib.closing(LocalCluster(cluster)) as running:
        yield running.url


def _run(client: Any, input_file: Path, output: Any, concurrency: int, total: int) -> None:
    from common.base.progress import LiveProgress
    from kvrelay.batch.input_file import read_lines
    from kvrelay.batch.runner import run_batch

    async def run() -> None:
        async with client:
            with LiveProgress("requests", total=total, completed=len(output.finished)) as progress:
                await run_batch(
                    read_lines(input_file),
                    output,
                    client,
                    concurrency=concurrency,
                    on_result=progress.advance,
                )

    asyncio.run(run())


def _report(output: Any, before: int) -> None:
    """Print the counts of results. Raises: BatchFailed if any result is not an answer."""
    from kvrelay.batch.output_file import BatchFailed

    total, failed = len(output.finished), output.failed
    earlier = f", {counted(before, 'result')} from earlier runs" if before else ""
    summary = f"{total - failed} of {counted(total, 'request')} answered{earlier}: {output.path}"
    if failed:
        raise BatchFailed(f"{summary}; {failed} failed")
    print(f"kvrelay: {summary}", file=sys.stderr)
