"""Runs a batch: the requests of a file that have no result yet, a bounded number at once."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Generator, Sequence
from http import HTTPStatus
from pathlib import Path

from common.base.errors import DeadlineExceeded
from common.base.progress import LiveProgress
from common.base.sentences import counted
from kvrelay.api_client import ApiAnswer, ApiClient, NotAnApiAnswer, run_workers
from kvrelay.batch.input_file import BadBatch, BatchLine, check_lines, read_lines
from kvrelay.batch.output_file import BatchFailed, OutputFile
from kvrelay.local_cluster import LocalCluster, own_key
from kvrelay.served_models import default_url


def run_batch(
    input_file: Path,
    output_file: Path,
    *,
    url: str | None,
    cluster: Sequence[str] | None,
    api_key: str,
    concurrency: int,
    attempts: int,
    timeout_s: float,
) -> None:
    """Answer all requests of `input_file` that have no result in `output_file`, and print how many were answered.

    `url`: the server; None: the default one. `cluster`: arguments of `kvrelay up`, whose cluster answers instead.

    Raises: BadBatch for wrong files, ServerUnreachable if the server is gone, BatchFailed if it refuses the API key, which is
    about no single request, if a result cannot be written, or if any result is not an answer. Every result so far stays.
    """
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
                client = ApiClient(address, key, connections=concurrency, timeout_s=timeout_s, attempts=attempts)
                asyncio.run(_send_all(client, input_file, output, concurrency, len(custom_ids)))
    total, failed = len(output.finished), output.failed
    earlier = f", {counted(before, 'result')} from earlier runs" if before else ""
    summary = f"{total - failed} of {counted(total, 'request')} answered{earlier}: {output.path}"
    if failed:
        raise BatchFailed(f"{summary}; {failed} failed")
    print(f"kvrelay: {summary}", file=sys.stderr)


@contextlib.contextmanager
def _server(url: str | None, cluster: Sequence[str] | None) -> Generator[str]:
    """The URL of the server to ask; with `cluster`, one that runs until the block ends."""
    if cluster is None:
        yield url or default_url()
        return
    print(f"kvrelay: starting a cluster: {' '.join(cluster)}", file=sys.stderr, flush=True)
    with contextlib.closing(LocalCluster(cluster)) as running:
        yield running.url


async def _send_all(client: ApiClient, input_file: Path, output: OutputFile, concurrency: int, total: int) -> None:
    """Send the requests without a result, and write each result as it comes. Lines are read no faster than requests are sent."""
    async with client:
        with LiveProgress("requests", total=total, completed=len(output.finished)) as progress:

            async def send(line: BatchLine) -> None:
                try:
                    outcome = await client.post(line.url, line.body)
                except (DeadlineExceeded, NotAnApiAnswer) as error:
                    outcome = error
                if isinstance(outcome, ApiAnswer) and outcome.status_code == HTTPStatus.UNAUTHORIZED:
                    raise BatchFailed(
                        f"{client.url} refuses the API key (401), which --api-key or KVRELAY_API_KEY gives"
                    )
                output.add(line.custom_id, outcome)
                progress.advance()

            remaining = (line for line in read_lines(input_file) if line.custom_id not in output.finished)
            await run_workers(remaining, send, concurrency)
