"""`make gpu-check`: all tests that a GPU should pass, in groups, each in a process of its own, within a budget.

    scripts/gpu-check [--budget-s 450] [--only NAME,...]

An access to wrong memory spoils everything that its process does on the GPU afterwards: so the next group gets a new
one. Groups run in the order of their importance. One that hangs is ended; those for which no time is left are left
out; both are named at the end, and then, as after a failed test, the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_BUDGET_S = 450.0
_LEAST_S = 15.0
"""Less is not worth beginning: importing takes as long."""
_GRACE_S = 20.0
"""For an interrupted group to stop what it started."""
_OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
_OUTCOME = re.compile(rf"::.* ({'|'.join(_OUTCOMES)})(?: \(.*\))? +\[ *\d+%\]$")
_SANITIZER = "tests/gpu/test_relay_on_gpu.py::test_sanitizer_finds_nothing_in_the_kernel"


@dataclass(frozen=True)
class Group:
    """Tests of one process. `at_most_s`: it is ended after so long."""

    name: str
    at_most_s: float
    arguments: tuple[str, ...]


_ATTENTION, _RUNNER = "tests/gpu/test_gpu_attention.py", "tests/gpu/test_gpu_exactness.py"
_GRAPHS = "tests/gpu/test_gpu_decode_graphs.py"
# Attention in float16 is made of kernels that scripts/gpu-build does not build unless asked, and that then compile here.
_OTHERS, _FLOAT16 = ("-k", "bfloat16 or not float16"), ("-k", "float16 and not bfloat16")
# Ranks would need a GPU each. Of the classes of transformers: one that computes as ours, experts, latent attention, windows.
_FEATURES = (
    "tests/integration/test_lora.py", "tests/integration/test_quantization.py", "tests/integration/test_two_models.py",
    "tests/integration/test_sliding_windows.py", "tests/integration/test_sampling_is_keyed.py",
    "tests/integration/test_generic_models.py", "tests/fault/test_structured_streams.py",
    "-k", "not generic_models and not tp2 or glm4 or granitemoe or deepseek or exaone4",
)  # fmt: skip

GROUPS = (
    Group("kernels", 120, ("tests/gpu/test_gpu_device.py", "tests/gpu/test_gpu_kernels.py", _ATTENTION, *_OTHERS)),
    Group("quantized", 60, ("tests/gpu/test_gpu_quantized.py",)),
    Group("runner", 120, (_RUNNER, *_OTHERS)),
    Group("graphs", 90, (_GRAPHS, *_OTHERS)),
    Group("relay", 100, ("tests/gpu/test_relay_on_gpu.py", "--deselect", _SANITIZER)),
    Group("system", 90, ("tests/gpu/test_gpu_system.py",)),
    Group("sampler", 40, ("tests/gpu/test_gpu_sampler.py",)),
    Group("kills", 120, ("tests/fault/test_kills.py",)),
    Group("families", 220, ("tests/integration/test_exactness.py",)),
    Group("features", 330, ("-m", "not browser", *_FEATURES)),
    Group("sanitizer", 160, ("tests/gpu/test_gpu_sanitizer.py", _SANITIZER)),
    Group("fp8 kv", 80, ("tests/integration/test_fp8_kv.py",)),
    Group("float16", 240, (_ATTENTION, _RUNNER, _GRAPHS, *_FLOAT16)),
)  # fmt: skip


@dataclass
class Told:
    """What became of one group."""

    name: str
    took_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])
    end: str = ""
    """Why it is not whole; empty if it is."""

    @property
    def is_good(self) -> bool:
        """Whether everything in it ran and nothing failed."""
        return not self.end and not self.counts["FAILED"] and not self.counts["ERROR"]

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[name]} {name.lower()}" for name in _OUTCOMES if self.counts[name])
        return f"{self.name:<12}{self.took_s:5.0f} s  " + "; ".join(filter(None, (counts, self.end)))


def run_group(group: Group, left_s: float) -> Told:
    """Run one group in a process of its own, its output passed on."""
    told, started = Told(group.name), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-v", "--timeout", "150", "--durations", "5", *group.arguments]
    process = subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    allowed_s = min(group.at_most_s, left_s)
    late = threading.Event()
    watchdog = threading.Thread(target=_end_after, args=(process, allowed_s, late), daemon=True)
    watchdog.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if outcome := _OUTCOME.search(line):
                told.counts[outcome[1]] += 1
        code = process.wait()
    except BaseException:  # Ctrl-C or SIGTERM, of which the group's own session hears nothing
        _end(process)
        raise
    told.took_s = time.monotonic() - started
    watchdog.join()
    if late.is_set():
        told.end = f"ended after {allowed_s:.0f} s, not whole"
    elif code not in (0, 1):
        told.end = f"its process ended with {code}"
    return told


def _end_after(process: subprocess.Popen[str], allowed_s: float, late: threading.Event) -> None:
    """Interrupt a group that is late, which then stops its nodes; end it a while later. However it ended, end what it left:
    that still holds memory of the GPU."""
    try:
        process.wait(allowed_s)
    except subprocess.TimeoutExpired:
        late.set()
    _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_all(groups: Sequence[Group], budget_s: float) -> list[Told]:
    """One group after the other, as long as there is time."""
    until_s, all_told = time.monotonic() + budget_s, []
    for group in groups:
        left_s = until_s - time.monotonic()
        if left_s < min(_LEAST_S, group.at_most_s):
            all_told.append(Told(group.name, end="LEFT OUT, there was no time left"))
            continue
        print(f"=== {group.name}, {left_s:.0f} s left", flush=True)
        all_told.append(run_group(group, left_s))
    return all_told


def main() -> int:
    """Returns 1 unless every group ran whole and well."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help="seconds for all groups")
    parser.add_argument("--only", default="", help=f"of: {', '.join(group.name for group in GROUPS)}")
    arguments = parser.parse_args()
    names = [group.name for group in GROUPS]
    wanted = arguments.only.split(",") if arguments.only else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no group is called {', '.join(unknown)}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    started = time.monotonic()
    all_told = run_all([group for group in GROUPS if group.name in wanted], arguments.budget_s)
    print(f"\n=== all groups, {time.monotonic() - started:.0f} s of {arguments.budget_s:.0f}")
    print(*all_told, sep="\n")
    return 0 if all_told and all(told.is_good for told in all_told) else 1


if __name__ == "__main__":
    sys.exit(main())
