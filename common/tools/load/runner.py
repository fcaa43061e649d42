"""Sends the jobs of one process and records their outcomes. Runs on its own asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from common.tools.load.jobs import Job
from common.tools.load.outcome import Outcome, read_outcome
from common.tools.load.plan import LoadPlan, Workload
from common.tools.load.stream import RequestFailed, Stream, Target

_AHEAD_S = 0.001
"""The event loop wakes up at least this late; jobs due by then are sent now."""

_IDLE_CLOSE_S = 0.1
"""A reused connection that breaks within this time was being closed as idle; after it, the server failed the request."""

OnOutcome = Callable[[Outcome], None]


class Runner:
    """The part of a run that one process executes."""

    def __init__(self, plan: LoadPlan, workload: Workload, process: int, on_outcome: OnOutcome) -> None:
        self._plan = plan
        self._workload = workload
        self._process = process
        self._on_outcome = on_outcome
        headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
        self._target = Target(plan.url, headers)
        self._path = "/v1/chat/completions" if plan.chat else "/v1/completions"
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
        jobs = iter(self._workload.warm_up())
        self._start_s = time.perf_counter()

        async def worker() -> None:
            for job in jobs:
                outcome = await self._one(job)
                if outcome.error:
                    raise RequestFailed(f"a warm-up request failed: {outcome.detail or outcome.error}", outcome.error)

        await asyncio.gather(*(worker() for _ in range(self._plan.concurrency or 4)))

    async def _one_after_the_other(self, jobs: Iterator[Job]) -> None:
        for job in jobs:
            if self._plan.duration_s and time.perf_counter() - self._start_s >= self._plan.duration_s:
                return
            self._on_outcome(await self._one(job))

    async def _at_their_times(self, jobs: Iterator[Job]) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for job in jobs:
            assert job.at_s is not None
            if self._plan.duration_s and job.at_s > self._plan.duration_s:
                break
            # Built early, so that it can be sent on time.
            stream = self._stream(job)
            wait_s = self._start_s + job.at_s - time.perf_counter()
            if wait_s > _AHEAD_S:
                await asyncio.sleep(wait_s)
            task = asyncio.ensure_future(self._report(job, stream))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _report(self, job: Job, stream: Stream) -> None:
        self._on_outcome(await self._one(job, stream))

    async def _one(self, job: Job, stream: Stream | None = None) -> Outcome:
        stream = stream or self._stream(job)
        due_s = time.perf_counter() if job.at_s is None else self._start_s + job.at_s
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._target.send(stream)
                await stream.ended.wait()
                if self._never_arrived(stream):
                    stream = await self._target.send(self._stream(job))
                    await stream.ended.wait()
        except TimeoutError:
            stream.sent_s = stream.sent_s or due_s  # not even a connection was made
            stream.finish(RequestFailed(f"not finished after {self._plan.timeout_s:g} s", "timeout"))
            stream.close()
        except OSError as error:
            stream.sent_s = stream.sent_s or time.perf_counter()
            stream.finish(RequestFailed(str(error), "connection"))
        return read_outcome(job.number, stream, self._start_s, max(0.0, stream.sent_s - due_s))

    @staticmethod
    def _never_arrived(stream: Stream) -> bool:
        """Whether the server closed an idle connection just as it was reused, which is no error."""
        reused = stream.connection is not None and stream.connection.used > 1
        soon = stream.ended_s - stream.sent_s < _IDLE_CLOSE_S
        return reused and soon and stream.error is not None and stream.status == 0

    def _stream(self, job: Job) -> Stream:
        plan = self._plan
        body: dict[str, Any] = {
            "model": plan.model,
            "max_tokens": job.output_tokens,
            "temperature": plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if plan.temperature:
            body["seed"] = plan.seed * 1_000_003 + job.number % 1_000_003
        if plan.chat:
            system = [{"role": "system", "content": job.system}] if job.system else []
            body["messages"] = [*system, {"role": "user", "content": job.prompt or "Go on."}]
        else:
            body["prompt"] = job.prompt
        return self._target.stream(self._path, body)
