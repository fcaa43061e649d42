"""Decode steps of a small model beside processes that compute without end: what a neighbour on the same cores costs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.results import Result, median
from bench.session import Session
from bench.shape import SHAPES, make_model_folder
from bench.worker import PASSIVE, Worker

from common.base.process import tied_command

_CONTEXT, _STEPS, _SETTLE_S = 256, 100, 0.5
_ROWS, _NEIGHBOURS = (1, 16), (0, 1, 2)


def run(session: Session) -> Result:
    """Median and p99 of steps of 1 and 16 rows beside 0, 1 and 2 such processes, in turns."""
    result = Result("neighbours")
    session.stop_system()
    session.stop_plain()
    steps: dict[tuple[int, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as temporary:
        folder = make_model_folder(SHAPES["tiny" if session.options.quick else "33m"], Path(temporary))
        with contextlib.closing(Worker("bench.plain:Plain", environ=PASSIVE, folder=str(folder))) as plain:
            plain.call("decode", batch=1, context=_CONTEXT, steps=_STEPS)
            for _ in range(session.repeats(5, 1)):
                for count in _NEIGHBOURS:
                    with _computing(count):
                        for rows in _ROWS:
                            step = plain.call("decode", batch=rows, context=_CONTEXT, steps=_STEPS)
                            steps.setdefault((rows, count), []).append(step)
    for (rows, count), measured in sorted(steps.items()):
        p50, p99 = (1e3 * median([step[key] for step in measured]) for key in ("median_step_s", "p99_step_s"))
        alone = 1e3 * median([step["median_step_s"] for step in steps[rows, 0]])
        name = f"step of {rows} rows beside {count} processes"
        result.add(name, p50, "ms", limit=alone if count else None, limit_name="alone", note=f"p99 {p99:.1f} ms")
    return result


@contextlib.contextmanager
def _computing(count: int) -> Iterator[None]:
    """`count` other processes that compute without end, each in a session of its own, as another service would be."""
    command = tied_command([sys.executable, "-c", "while True: pass"])
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(_SETTLE_S if count else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
