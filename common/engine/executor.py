"""Between the leader's scheduler and the ranks that compute.

With one rank the executor is in the leader's process and thread: no hop, a step's output comes back at once.
With several (`common.node.ranks`) a step is started here, and its output may come later as a `StepDone` event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.engine.step import StepInput, StepOutput
from common.protocol import AttemptKey

OnBlocksFinal = Callable[[AttemptKey, int, int], None]
"""(attempt, layer of this rank, number of leading blocks whose KV in that layer is final)"""


@dataclass(frozen=True)
class StepDone:
    """A started step's output, as an event of the engine loop. Steps are done in the order of their start."""

    output: StepOutput


class Executor(Protocol):
    """Runs steps on all ranks of a node. The scheduler bounds how many are in flight."""

    def submit(self, step: StepInput) -> StepOutput | None:
        """Run a step, or start it and have its output come as `StepDone`.

        Raises: EngineError if the step failed; the ranks can go on with another step.
        """
        ...


class Runner(Protocol):
    """One rank's model, as `common.engine.runner.ModelRunner` implements it."""

    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput: ...


class LocalExecutor:
    """One rank. Tells the transfer sender of every layer as it becomes final."""

    def __init__(self, runner: Runner, on_blocks_final: OnBlocksFinal | None = None) -> None:
        self._runner = runner
        self._on_blocks_final = on_blocks_final
        self.busy_s = 0.0
        """Sum of the steps' `forward_s` so far. For any thread to read."""

    def submit(self, step: StepInput) -> StepOutput:
        output = self._runner.execute(step, self._reporter(step))
        self.busy_s += output.forward_s
        return output

    def _reporter(self, step: StepInput) -> Callable[[int], None] | None:
        report = self._on_blocks_final
        if report is None or not step.relay:
            return None

        def on_layer(layer: int) -> None:
            for progress in step.relay:
                report(progress.key, layer, progress.num_blocks)

        return on_layer
