"""Runs the requests of a batch that have no result yet, a bounded number at once. One asyncio loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus

from common.base.errors import DeadlineExceeded
from kvrelay.api_client import ApiAnswer, ApiClient, NotAnApiAnswer, run_workers
from kvrelay.batch.input_file import BatchLine
from kvrelay.batch.output_file import BatchFailed, OutputFile


async def run_batch(
    lines: Iterable[BatchLine],
    output: OutputFile,
    client: ApiClient,
    *,
    concurrency: int,
    on_result: Callable[[], None],
) -> None:
    """Send the requests and write each result as it comes. `lines` is read no faster than requests are sent.

    Raises: ServerUnreachable if the server is gone, BatchFailed if it refuses the API key, which is about no single request,
    or if a result cannot be written; every result so far stays.
    """

    async def send(line: BatchLine) -> None:
        try:
            outcome = await client.post(line.url, line.body)
        except (DeadlineExceeded, NotAnApiAnswer) as error:
            outcome = error
        if isinstance(outcome, ApiAnswer) and outcome.status_code == HTTPStatus.UNAUTHORIZED:
            raise BatchFailed(f"{client.url} refuses the API key (401), which --api-key or KVRELAY_API_KEY gives")
        output.add(line.custom_id, outcome)
        on_result()

    remaining = (line for line in lines if line.custom_id not in output.finished)
    await run_workers(remaining, send, concurrency)
