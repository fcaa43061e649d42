"""`make bench`: measures the project's performance goals, prints one table and writes JSON. A missed goal is no failure.

    python tests/bench/main.py [--only decode_single,relay] [--quick] [--json FILE]

Every figure is shown with a limit of the machine, or a peer, that was measured in the same run, because machines
differ and drift. Ratios are medians of interleaved pairs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from bench.command import Run, end_by_exception, make_parser, parse  # noqa: E402

BENCHES = {
    "idle": "bench.idle:run",
    "start": "bench.start:run",
    "limits": "bench.limits:run",
    "decode_single": "bench.decode:run_single",
    "decode_batch": "bench.decode:run_batch",
    "lora": "bench.lora:run",
    "prefill": "bench.prefill:run",
    "attention": "bench.attention:run",
    "latents": "bench.latents:run",
    "context_parallel": "bench.context_parallel:run",
    "engine_overhead": "bench.overhead:run",
    "small_step": "bench.small_step:run",
    "neighbours": "bench.neighbours:run",
    "sampling": "bench.sampling:run",
    "long_text": "bench.long_text:run",
    "small_model": "bench.small_model:run",
    "fair_shares": "bench.fair_shares:run",
    "hostile_bodies": "bench.hostile_bodies:run",
    "schemas": "bench.schemas:run",
    "speculation": "bench.speculation:run",
    "interference": "bench.interference:run",
    "relay": "bench.relay:run",
    "router": "bench.router_cost:run",
    "pipeline": "bench.pipeline:run",
    "transports": "bench.transports:run",
    "mtls": "bench.mtls:run",
    "overlap": "bench.overlap:run",
}
"""In the order of running, so that benchmarks that share processes are neighbours."""


def _arguments() -> argparse.Namespace:
    parser = make_parser("bench", __doc__, BENCHES)
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, for rough figures")
    parser.add_argument(
        "--favor",
        default="balanced",
        metavar="MODE,...",
        help="for interference: of itl, balanced, ttft (default: balanced)",
    )
    parser.add_argument(
        "--arrival-s", type=float, default=10.0, metavar="S", help="for interference: seconds between long prompts"
    )
    parser.add_argument(
        "--shape",
        default="0.5b",
        choices=["0.5b", "tiny"],
        help="the model's shape; tiny only shows that the script runs",
    )
    arguments = parse(parser, BENCHES)
    arguments.favors = tuple(arguments.favor.split(","))
    for favor in arguments.favors:
        if favor not in ("itl", "balanced", "ttft"):
            parser.error(f"--favor {favor!r} is none of itl, balanced, ttft")
    return arguments


def main() -> int:
    """Run the chosen benchmarks. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    end_by_exception()
    from bench.session import Options, Session

    options = Options(arguments.shape, arguments.quick, arguments.favors, arguments.arrival_s)
    session = Session(options)
    try:
        run = Run(session.about(), session.results)
        for name in [name for name in BENCHES if name in arguments.only]:
            run.measure(name, lambda name=name: _load(BENCHES[name])(session))
    finally:
        session.close()
    return run.conclude(arguments.json)


def _load(place: str) -> Callable[[Any], Any]:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    sys.exit(main())
