"""One run of the benchmarks: its options, and the processes that several benchmarks share, started when first needed."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine_best import BestLimits
from bench.shape import SHAPES, Shape, make_model_folder
from bench.worker import PASSIVE, ROOT, Worker
from support.system import System, running_system

RESULTS = ROOT / "bench-results"
_KV_MEMORY_GB = 1.0
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    shape: str = "0.5b"
    quick: bool = False
    """Few repetitions and short runs."""
    favors: tuple[str, ...] = ("balanced",)
    arrival_s: float = 10.0
    """Seconds between long prompts in the interference benchmark."""


@dataclass
class Session:
    """Owns every process of the run; `close` ends them all."""

    options: Options
    rng: random.Random = field(default_factory=lambda: random.Random(20_250_101))

    def __post_init__(self) -> None:
        self.shape: Shape = SHAPES[self.options.shape]
        self.folder: Path = make_model_folder(self.shape, RESULTS)
        self._limits: BestLimits | None = None
        self._plain: Worker | None = None
        self._system: tuple[str, System, contextlib.ExitStack] | None = None

    @property
    def results(self) -> Path:
        """Where JSON goes: figures that mean nothing are kept apart."""
        return RESULTS if self.options.shape == "0.5b" else RESULTS / self.options.shape

    @property
    def model_name(self) -> str:
        """As the router lists it."""
        return self.folder.name

    @property
    def kv_memory_bytes(self) -> float:
        """Of each node of `system`."""
        return _KV_MEMORY_GB * 2**30

    def repeats(self, full: int, quick: int = 1) -> int:
        """How often to repeat something."""
        return quick if self.options.quick else full

    @property
    def limits(self) -> BestLimits:
        """What the machine can do, as measured so far in this run."""
        if self._limits is None:
            self._limits = BestLimits(
                Worker("bench.machine:Machine", environ=PASSIVE, small=self.options.shape == "tiny")
            )
        return self._limits

    @property
    def plain(self) -> Worker:
        """The same model code without a server (`load.plain.Plain`)."""
        if self._plain is None:
            self._plain = Worker("bench.plain:Plain", environ=PASSIVE, folder=str(self.folder))
        return self._plain

    def system(self, favor: str = "balanced") -> System:
        """A running `kvrelay up` with one prefill and one decode node; one at a time."""
        if self._system is not None and self._system[0] == favor:
            return self._system[1]
        self.stop_system()
        stack = contextlib.ExitStack()
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-bench-")))
            system = stack.enter_context(running_system(folder, *self._up_arguments(), "--favor", favor))
            system.wait_usable(timeout_s=_START_TIMEOUT_S)
        except BaseException:
            stack.close()
            raise
        self._system = (favor, system, stack)
        return system

    def _up_arguments(self) -> list[str]:
        return [
            *("--model", str(self.folder), "--load-format", "dummy", "--dtype", "bfloat16"),
            *("--kv-memory-gb", str(_KV_MEMORY_GB), "--log-level", "warning"),
            *("--start-timeout-s", str(_START_TIMEOUT_S)),
        ]

    @contextlib.contextmanager
    def own_system(self, *arguments: str) -> Iterator[System]:
        """`kvrelay up` with these arguments for one bench, alone on the machine."""
        self.stop_system()
        self.stop_plain()
        with (
            tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder,
            running_system(Path(folder), "--log-level", "warning", *arguments) as system,
        ):
            system.wait_usable()
            yield system

    def stop_system(self) -> None:
        """End the running cluster, if there is one."""
        if self._system is not None:
            _, _, stack = self._system
            self._system = None
            stack.close()

    def stop_plain(self) -> None:
        """End the plain engine's process: its memory is needed elsewhere."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None

    def close(self) -> None:
        """End everything."""
        try:
            self.stop_system()
        finally:
            self.stop_plain()
            if self._limits is not None:
                self._limits.close()
                self._limits = None

    def about(self) -> dict[str, Any]:
        """What the figures were taken with."""
        return {**self.limits.about(), "shape": self.options.shape, "quick": self.options.quick}
