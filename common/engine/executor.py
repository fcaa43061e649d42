"""Executors run the scheduler's steps on the ranks that compute.

With one rank the executor runs in the leader's process and thread and returns a step's output directly. With a pipeline
(`common.node.ranks.links`), or with asynchronous scheduling (`AsyncExecutor`), it starts a step, whose output comes
later as a `StepDone` event.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.engine.kv_transfer import OnBlocksFinal
from common.engine.runner import ModelRunner
from common.engine.step import StepInput, StepOutput


@dataclass(frozen=True)
class StepDone:
    """A started step's output, as an event of the engine loop. Steps are done in the order of their start."""

    output: StepOutput


@dataclass(frozen=True)
class StepFailed:
    """A started step failed, as an event of the engine loop in place of its `StepDone`."""

    step_id: int
    error: Exception


class Executor(Protocol):
    """Runs steps on all ranks of a node. The scheduler bounds how many are in flight."""

    def submit(self, step: StepInput) -> StepOutput | None:
        """Run a step and return its output, or start it; its output then comes as `StepDone`.

        Raises: EngineError if the step failed; the ranks can go on with another step.
        """
        ...


@dataclass(frozen=True)
class RunningStep:
    """A started step."""

    wait: Callable[[], StepOutput]
    """Waits for the step's output. Any thread. Raises: EngineError if the step failed, RankLost."""


class LocalExecutor:
    """Runs steps on one rank. Reports each layer to the transfer sender when its KV is final."""

    def __init__(self, runner: ModelRunner, on_blocks_final: OnBlocksFinal | None = None) -> None:
        self._runner = runner
        self._on_blocks_final = on_blocks_final
        self.busy_s = 0.0
        """Sum of the steps' `forward_s` so far. For any thread to read."""

    def submit(self, step: StepInput) -> StepOutput:
        return self.start(step).wait()

    def start(self, step: StepInput) -> RunningStep:
        """Launch a step. Its `wait` belongs to one thread."""
        launched = self._runner.launch(step, self._reporter(step))

        def wait() -> StepOutput:
            output = launched.wait()
            self.busy_s += output.forward_s
            return output

        return RunningStep(wait)

    def _reporter(self, step: StepInput) -> Callable[[int], None] | None:
        report = self._on_blocks_final
        if report is None or not step.relay:
            return None

        def on_layer(layer: int) -> None:
            for progress in step.relay:
                report(progress.key, layer, progress.num_blocks)

        return on_layer


class AsyncExecutor:
    """Starts steps on the engine's thread without waiting there; a thread of its own waits and posts the outcomes."""

    def __init__(
        self, start: Callable[[StepInput], RunningStep], post: Callable[[StepDone | StepFailed], None]
    ) -> None:
        """`start`: that of a `LocalExecutor`, or of a `MultiRankExecutor` without a pipeline."""
        self._start = start
        self._post = post
        self._started: queue.SimpleQueue[tuple[int, RunningStep] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._collect, name="outputs", daemon=True)
        self._thread.start()

    def submit(self, step: StepInput) -> None:
        """Raises: EngineError or RankLost if the step could not even be started."""
        self._started.put((step.step_id, self._start(step)))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; later outputs are lost."""
        self._started.put(None)
        self._thread.join(timeout_s)

    def _collect(self) -> None:
        while (started := self._started.get()) is not None:
            step_id, pending = started
            try:
                event: StepDone | StepFailed = StepDone(pending.wait())
            except Exception as error:  # the engine's thread handles any error
                event = StepFailed(step_id, error)
            self._post(event)
