"""Sends the jobs of one process and records their outcomes. Runs on its own asyncio loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvrelay.load.jobs import LoadJob, synthetic_job
from kvrelay.load.outcome import RequestOutcome, read_outcome
from kvrelay.load.sessions import Conversation, first_messages, read_answer
from kvrelay.load.stream import RequestFailed, Stream, Target
from kvrelay.load.workload import Workload

_AHEAD_S = 0.001
"""The event loop wakes up at least this late; jobs due by then are sent now."""

_IDLE_CLOSE_S = 0.1
"""A reused connection that breaks within this time was being closed as idle; after it, the server failed the request."""

_FAILED_PAUSE_S = 0.5
"""Pause of a closed loop's worker after a request that failed: a server that is gone, or refuses at once, would be flooded."""

OnOutcome = Callable[[RequestOutcome], None]
"""Called for every outcome as it arrives."""


class LoadRunner:
    """The part of a run that one process executes."""

    def __init__(self, workload: Workload, process: int, on_outcome: OnOutcome) -> None:
        self._plan = plan = workload.plan
        self._workload = workload
        self._process = process
        self._on_outcome = on_outcome
        headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
        self._target = Target(plan.url, headers)
        self._path = "/v1/chat/completions" if plan.sends_chats else "/v1/completions"
        self._start_s = 0.0

    async def run(self, start_s: float) -> None:
        """Run from `start_s` (by `time.perf_counter`) until the last response has arrived."""
        self._start_s = start_s
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        jobs = self._workload.jobs(self._process)
        try:
            if self._plan.concurrency:
                share = self._plan.concurrency // self._plan.processes
                share += self._process < self._plan.concurrency % self._plan.processes
                await asyncio.gather(*(self._one_after_the_other(jobs) for _ in range(share)))
            else:
                await self._at_their_times(jobs)
        finally:
            self._target.close()

    async def warm_up(self) -> None:
        """Send the warm-up jobs. Raises: RequestFailed if one fails."""
        jobs = (synthetic_job(self._plan, -1 - number) for number in range(self._plan.warmup))
        self._start_s = time.perf_counter()

        async def worker() -> None:
            for job in jobs:
                outcome = await self._one(job)
                if outcome.error:
                    raise RequestFailed(f"a warm-up request failed: {outcome.detail or outcome.error}", outcome.error)

        await asyncio.gather(*(worker() for _ in range(self._plan.concurrency or 4)))

    async def _one_after_the_other(self, jobs: Iterator[LoadJob]) -> None:
        for job in jobs:
            if self._is_over():
                return
            if await (self._session(job) if job.pauses_s else self._report(job)):
                await asyncio.sleep(_FAILED_PAUSE_S)

    def _is_over(self) -> bool:
        """Whether the time in which requests are started has ended."""
        return bool(self._plan.duration_s) and time.perf_counter() - self._start_s >= self._plan.duration_s

    async def _at_their_times(self, jobs: Iterator[LoadJob]) -> None:
        tasks: set[asyncio.Task[str]] = set()
        for job in jobs:
            assert job.at_s is not None
            if self._plan.duration_s and job.at_s > self._plan.duration_s:
                break
            # Built early, so that it can be sent on time.
            stream = None if job.pauses_s else self._stream(job)
            wait_s = self._start_s + job.at_s - time.perf_counter()
            # Also where it is late: else nothing would be sent until all jobs are built, and Ctrl-C would not end it.
            await asyncio.sleep(wait_s if wait_s > _AHEAD_S else 0)
            task = asyncio.ensure_future(self._session(job) if job.pauses_s else self._report(job, stream))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _report(self, job: LoadJob, stream: Stream | None = None) -> str:
        """Send a request. Returns its kind of error, empty on success."""
        outcome = await self._one(job, stream)
        self._on_outcome(outcome)
        return outcome.error

    async def _session(self, first: LoadJob) -> str:
        """Send the turns of a session; it ends early with the first that fails, and with the run.

        Returns the kind of error that ended it, empty if none did.
        """
        conversation = Conversation(self._plan, first)
        due_s = self._due_s(first)
        for turn, pause_s in enumerate((0.0, *first.pauses_s)):
            due_s += pause_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if turn and self._is_over():
                break
            number = first.number * self._plan.turns + turn
            stream = self._target.stream(self._path, self._body(number, conversation.fields()))
            stream, outcome = await self._send(number, due_s, stream)
            self._on_outcome(outcome)
            if outcome.error:
                return outcome.error
            conversation.take(read_answer([json.loads(data) for _, data in stream.events]))
            due_s = time.perf_counter()
        return ""

    def _due_s(self, job: LoadJob) -> float:
        return time.perf_counter() if job.at_s is None else self._start_s + job.at_s

    async def _one(self, job: LoadJob, stream: Stream | None = None) -> RequestOutcome:
        return (await self._send(job.number, self._due_s(job), stream or self._stream(job)))[1]

    async def _send(self, number: int, due_s: float, stream: Stream) -> tuple[Stream, RequestOutcome]:
        """Send a request and wait for its end. Returns its stream, another one if it had to be sent again."""
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._target.send(stream)
                await stream.ended.wait()
                if self._never_arrived(stream):
                    stream = await self._target.send(Stream(stream.request))
                    await stream.ended.wait()
        except TimeoutError:
            stream.finish(RequestFailed(f"not finished after {self._plan.timeout_s:g} s", "timeout"))
            stream.close()
        except OSError as error:
            stream.finish(RequestFailed(str(error), "connection"))
        return stream, read_outcome(number, stream, self._start_s, max(0.0, stream.sent_s - due_s))

    @staticmethod
    def _never_arrived(stream: Stream) -> bool:
        """Whether the server closed an idle connection just as it was reused, which is no error."""
        reused = stream.connection is not None and stream.connection.used > 1
        soon = stream.ended_s - stream.sent_s < _IDLE_CLOSE_S
        return reused and soon and stream.error is not None and stream.status == 0

    def _stream(self, job: LoadJob) -> Stream:
        fields: dict[str, Any] = {"max_tokens": job.output_tokens}
        fields |= {"messages": first_messages(job)} if self._plan.sends_chats else {"prompt": job.prompt}
        return self._target.stream(self._path, self._body(job.number, fields))

    def _body(self, number: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The body of request `number` with these fields. An answer that calls tools ends when the call is complete."""
        plan = self._plan
        body: dict[str, Any] = {
            "model": plan.model,
            "temperature": plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos and "tools" not in fields:
            body["ignore_eos"] = True
        if plan.temperature:
            body["seed"] = plan.seed * 1_000_003 + number % 1_000_003
        return {**body, **fields}
