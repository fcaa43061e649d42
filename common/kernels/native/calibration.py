"""Which kernels multiply fastest on this processor: measured once, and kept beside the compiled library.

The candidates are the library's variants and oneDNN's products through PyTorch. One of them computes all products of a model, the
best over all row counts together, because a row's result must not depend on the batch that it is in. Runs before a model is
loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.base.errors import ConfigError
from common.base.files import locked, write_whole
from common.kernels.native.build import keep_newest, native_folder

log = logging.getLogger(__name__)

TORCH = "torch"
ROWS = (1, 8, 16, 64, 256, 2048)
_MARGIN = 0.8
"""Another candidate is chosen only if it takes less than this share of the usual variant's time. Nodes that choose differently
exchange no KV, so noise must not decide. With oneDNN's products everything else is PyTorch's too, and slower."""
_HOPELESS = 2.5
"""A candidate whose times after a turn are more than this multiple of the best one's is not measured again."""
_TURNS = 3
_CROWDED = 0.1
"""If this process's threads waited for cores for more than this share of the measurement, the times are not used."""
_INPUTS, _OUTPUTS, _COPIES = 992, 2048, 12
"""49 MB of bfloat16 weights in all, so that products of few rows read them from memory, as in a model. Rows are not a power of
two apart, as in the engine."""
_LOCK = "lock-choice"
_LOCK_TIMEOUT_S = 10.0

Product = Callable[[torch.Tensor, int], object]
"""Multiplies rows [rows, in] by copy number `copy` of the weights."""


@dataclass(frozen=True)
class Choice:
    """The kernels to use, and the geometric mean of each candidate's times over those of the chosen one."""

    kernels: str
    times_as_long: Mapping[str, float]

    def __str__(self) -> str:
        others = (
            f"{'PyTorch' if name == TORCH else name} {factor:.1f} x"
            for name, factor in sorted(self.times_as_long.items(), key=lambda item: item[1])
            if name != self.kernels
        )
        return "times measured: " + ", ".join(others)


def choose(library: Path, threads: int, usual: str, candidates: Callable[[], Mapping[str, Product]]) -> Choice | None:
    """The choice for this processor, library and number of threads: the kept one, else measured now. None if it cannot be
    kept: nodes of one host that each measured for themselves might choose differently.

    `candidates`: makes the products to compare; `usual`: the one of them to use unless another is much faster.
    """
    try:
        folder = native_folder()
        kept = folder / f"choice-{_key(library, threads)}.json"
        if (choice := _read(kept)) is not None:
            return choice
        with locked(folder / _LOCK, time.monotonic() + _LOCK_TIMEOUT_S) as is_held:
            if not is_held:
                return None
            if (choice := _read(kept)) is None:  # another process may have measured it meanwhile
                products = candidates()
                choice = _measured(products, usual) if len(products) > 1 else Choice(usual, {usual: 1.0})
                _write(kept, choice)
            return choice
    except (OSError, ConfigError) as error:
        log.warning("no kernels are chosen by measurement: %s", error)
        return None


def _measured(candidates: Mapping[str, Product], usual: str) -> Choice:
    started, waited_s = time.monotonic(), _waited_s()
    times = measure(candidates)
    if _waited_s() - waited_s > _CROWDED * (time.monotonic() - started):
        log.warning(
            "kernels: the usual ones, %s, because other processes used the cores while times were measured; they are measured "
            "again after `kvrelay cache clear`",
            usual,
        )
        return best(times, usual, margin=0.0)
    return best(times, usual)


def _waited_s() -> float:
    """Seconds for which this process's threads were ready to run and had no core; 0 if the kernel does not say."""
    waited_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited_ns += int(file.read_text().split()[1])
    return waited_ns / 1e9


@torch.inference_mode()
def measure(candidates: Mapping[str, Product]) -> dict[str, list[float]]:
    """The shortest of several times of each candidate's product, in seconds, for each number in `ROWS`."""
    rows = [torch.randn(count, _INPUTS).bfloat16() for count in ROWS]
    times = {name: [math.inf] * len(ROWS) for name in candidates}
    for turn in range(_TURNS):
        means = {name: _mean(found) for name, found in times.items()}
        for name, product in candidates.items():
            if turn and means[name] > _HOPELESS * min(means.values()):
                continue
            for at, x in enumerate(rows):
                times[name][at] = min(times[name][at], _seconds(product, x))
    return times


def best(times: Mapping[str, Sequence[float]], usual: str, margin: float = _MARGIN) -> Choice:
    """The choice by these times. Pure. `margin`: another candidate must take less than this share of the usual one's time."""
    means = {name: _mean(found) for name, found in times.items()}
    fastest = min(means, key=lambda name: means[name])
    chosen = fastest if means[fastest] < margin * means[usual] else usual
    return Choice(chosen, {name: mean / means[chosen] for name, mean in means.items()})


def make_weights() -> list[torch.Tensor]:
    """The weights that candidates multiply by: [out, in] each."""
    return [torch.randn(_OUTPUTS, _INPUTS).bfloat16() for _ in range(_COPIES)]


def _seconds(product: Product, x: torch.Tensor) -> float:
    copies = _COPIES if x.size(0) <= 16 else 1
    started = time.perf_counter()
    for copy in range(copies):
        product(x, copy)
    return (time.perf_counter() - started) / copies


def _mean(times: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, times)) / len(times)) if math.inf not in times else math.inf


def _key(library: Path, threads: int) -> str:
    facts = (library.name, threads, torch.__version__, platform.machine(), _processor())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Identity of this kind of processor: the first one's name, stepping and features."""
    try:
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    changing = ("processor", "cpu MHz", "bogomips", "apicid", "initial apicid", "core id", "BogoMIPS")
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].strip() not in changing)


def _read(file: Path) -> Choice | None:
    try:
        kept = json.loads(file.read_text())
        times = {str(name): float(factor) for name, factor in kept["times_as_long"].items()}
        return Choice(kept["kernels"], times) if kept["kernels"] in times else None
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(file: Path, choice: Choice) -> None:
    text = json.dumps({"kernels": choice.kernels, "times_as_long": dict(choice.times_as_long)})
    write_whole(file, text.encode())  # readers do not take the lock
    keep_newest(file.parent, "choice-*.json")
