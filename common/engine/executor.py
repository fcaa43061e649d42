"""Between the leader's scheduler and the ranks that compute. With one rank the executor is in the
leader's process and thread: no hop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.engine.step import StepInput, StepOutput
from common.protocol import AttemptKey

OnBlocksFinal = Callable[[AttemptKey, int, int], None]
"""(attempt, layer of this rank, number of leading blocks whose KV in that layer is final)"""


class Executor(Protocol):
    """Runs steps on all ranks of a node."""

    def execute(self, step: StepInput) -> StepOutput:
        """Raises: EngineError if the step failed; the ranks can go on with another step."""
        ...


class Runner(Protocol):
    """One rank's model, as `common.engine.runner.ModelRunner` implements it."""

    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput: ...


class LocalExecutor:
    """The one rank of a single-rank node. Tells the transfer sender of every layer as it becomes final."""

    def __init__(self, runner: Runner, on_blocks_final: OnBlocksFinal | None = None) -> None:
        self._runner = runner
        self._on_blocks_final = on_blocks_final

    def execute(self, step: StepInput) -> StepOutput:
        report = self._on_blocks_final
        if report is None or not step.relay:
            return self._runner.execute(step)

        def on_layer(layer: int) -> None:
            for progress in step.relay:
                report(progress.key, layer, progress.num_blocks)

        return self._runner.execute(step, on_layer)
