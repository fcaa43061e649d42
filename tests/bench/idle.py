"""CPU time that a cluster without requests takes: `kvrelay up` with the demo model, all its processes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
from bench.results import Result, Target
from bench.session import Session
from support.system import running_system

_SETTLE_S = 30
"""The first idle time is used to supply pages of KV, which takes 10 s where the host must find the memory first."""


def run(session: Session) -> Result:
    """The share of one core of each process, then of all of them."""
    result = Result("idle")
    session.stop_system()
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder, running_system(Path(folder)) as system:
        system.wait_usable()
        names = {entry["pid"]: entry["name"] for entry in system.processes()} | {system.supervisor.pid: "kvrelay up"}
        for child in psutil.Process(system.supervisor.pid).children():
            names.setdefault(child.pid, "fork server")
        processes = [psutil.Process(pid) for pid in names]
        time.sleep(session.repeats(_SETTLE_S, 5))
        before_s, began_s = [_cpu_s(process) for process in processes], time.monotonic()
        time.sleep(session.repeats(60, 10))
        after_s, took_s = [_cpu_s(process) for process in processes], time.monotonic() - began_s
    shares = [100 * (after - before) / took_s for before, after in zip(before_s, after_s, strict=True)]
    for process, share in zip(processes, shares, strict=True):
        result.add(names[process.pid], share, "% of one core")
    result.add("all processes of an idle cluster", sum(shares), "% of one core", target=Target(1.0, at_most=True))
    return result


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of a process so far, in user and kernel mode, in seconds."""
    return sum(process.cpu_times()[:2])
