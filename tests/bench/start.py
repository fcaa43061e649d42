"""Seconds until `kvrelay up` is ready when packed weights are cached, and until a killed node serves again; and the memory
of all its processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from bench.peers.checkpoints import make_checkpoint
from bench.results import Result, Target, median
from bench.session import RESULTS, Session
from support.system import System, running_system, wait_until

from common.base.hashing import BLOCK_SIZE

_PATIENCE_S = 300.0
_KV_BLOCKS = 64
_SETTLE_S = 10.0
"""After the start nodes read the tokenizer for grammars, and the router gives free memory back."""
_STEADY_S = 1.5
"""After its first second of service a node is restarted without a delay."""


def run(session: Session) -> Result:
    """Starts in turn with imports of PyTorch, which no node can do without."""
    result = Result("start")
    session.stop_system()
    session.stop_plain()
    model = make_checkpoint(session.shape, RESULTS)
    imports, starts, restarts = [], [], []
    _start(model)  # packs the weights
    for _ in range(session.repeats(5, 1)):
        imports.append(_import_s())
        ready_s, again_s = _start(model)
        starts.append(ready_s)
        restarts.append(again_s)
    for name, seconds, goal in (
        ("kvrelay up, one prefill and one decode node, until ready", starts, 4.0),
        ("decode node after kill -9, until ready again", restarts, 2.0),
    ):
        result.add(
            name,
            median(seconds),
            "s",
            limit=median(imports),
            limit_name="importing PyTorch",
            target=Target(goal, at_most=True),
            note=f"{min(seconds):.1f} to {max(seconds):.1f} s",
        )
    kv_bytes = 2 * _KV_BLOCKS * BLOCK_SIZE * session.shape.kv_bytes_per_token()
    result.add(
        "memory of all processes beside the KV cache, pages that they share counted once",
        (_memory_bytes(model) - kv_bytes) / 1e9,
        "GB",
        limit=(model / "model.safetensors").stat().st_size / 1e9,
        limit_name="the weights",
        target=Target(1.7, at_most=True),
    )
    return result


def _import_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began_s


def _start(model: Path) -> tuple[float, float]:
    """Seconds until ready, and from the decode node's death until it is ready again."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        began_s = time.perf_counter()
        with running_system(Path(folder), "--model", str(model), "--dtype", "bfloat16") as system:
            ready_s = _wait_for_line(system, "kvrelay is ready at") - began_s
            time.sleep(_STEADY_S)
            died_s = time.perf_counter()
            system.kill("decode")
            return ready_s, _wait_for_line(system, "decode-0 is ready again") - died_s


def _memory_bytes(model: Path) -> int:
    """Proportional set size of `kvrelay up` and its services with `_KV_BLOCKS` for each node."""
    args = ("--model", str(model), "--dtype", "bfloat16", "--kv-blocks", str(_KV_BLOCKS))
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder, running_system(Path(folder), *args) as system:
        _wait_for_line(system, "kvrelay is ready at")
        time.sleep(_SETTLE_S)
        parent = psutil.Process(system.supervisor.pid)
        return sum(each.memory_full_info().pss for each in [parent, *parent.children(recursive=True)])


def _wait_for_line(system: System, text: str) -> float:
    """The time, as of `time.perf_counter`, when the log has `text`."""

    def shows() -> bool:
        assert system.supervisor.poll() is None, system.log_tail()
        return text in system.log_file.read_text(errors="replace")

    wait_until(shows, _PATIENCE_S, text, system.log_tail)
    return time.perf_counter()
