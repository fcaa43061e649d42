"""`scripts/bench-pooling`: embeddings beside sentence-transformers; a table, and JSON under bench-results/pooling/.

python -m tests.bench.pooling_main [--quick] [--threads N] [--json FILE]
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the nodes' setting, for both
os.environ["HF_HUB_OFFLINE"] = "1"

from bench.command import Run, end_by_exception, make_parser, parse  # noqa: E402


def _about(threads: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = {name: version(name) for name in ("torch", "sentence-transformers", "transformers")}
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "threads": threads, **packages}


def main() -> int:
    """Returns 1 if it could not be measured; a missed target breaks nothing."""
    parser = make_parser("bench-pooling", __doc__, ["pooling"])
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, for rough figures")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), metavar="N", help="of either (default: all cores)"
    )
    arguments = parse(parser, ["pooling"])
    end_by_exception()
    import torch
    from bench.pooling import run

    torch.set_num_threads(arguments.threads)
    measured = Run(_about(arguments.threads), _ROOT / "bench-results" / "pooling")
    measured.measure("pooling", lambda: run(arguments.quick))
    return measured.conclude(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
