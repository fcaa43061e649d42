"""What Python takes of a decode step of a small model: a node's real core, scheduler, runner and sampler, no sockets."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from bench.results import Result, Target, median
from bench.session import Session
from bench.shape import SHAPES, make_model_folder
from bench.worker import PASSIVE, Worker

_PROMPT, _ROWS = 128, (1, 8, 16)


def run(session: Session) -> Result:
    """Steps of 1, 8 and 16 rows, and their part outside the native kernels."""
    result = Result("small_step")
    session.stop_system()
    session.stop_plain()
    steps, repeats = session.repeats(300, 30), session.repeats(5, 1)
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as temporary:
        folder = make_model_folder(SHAPES["tiny" if session.options.quick else "33m"], Path(temporary))
        with contextlib.closing(Worker("bench.plain:Plain", environ=PASSIVE, folder=str(folder))) as plain:
            for rows in _ROWS:
                runs = [plain.call("python_share", batch=rows, prompt=_PROMPT, steps=steps) for _ in range(repeats)]
                result.add(
                    f"outside the native kernels, batch {rows}",
                    100 * median([run["share"] for run in runs]),
                    "%",
                    target=Target(10, at_most=True),
                    note=f"a step takes {1e3 * median([run['step_s'] for run in runs]):.1f} ms",
                )
    return result
