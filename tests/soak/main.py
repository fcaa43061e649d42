"""`scripts/soak`: streams run for minutes while one service after the other is killed, and another key takes what it can get. No
answer may change, a client that retries once gets its answer, and nothing grows."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from support.system import System, ranks_of, running_system  # noqa: E402

from soak.clients import Clients  # noqa: E402
from soak.growth import growth, sample  # noqa: E402
from soak.hostile import Hostile  # noqa: E402

_RESULTS = _ROOT / "bench-results" / "soak.json"
_SAMPLE_S = 5.0
_QUIET_S = 15.0
"""Before the first kill: what is cached and allocated at first use is no growth."""
_LAYOUT = ("--routers", "2", "--prefill", "2", "--decode", "2", "--decode-tp", "2", "--local-prefill-tokens", "16")

_KEY, _HOSTILE_KEY = "calm", "hostile"
_KEYS = ("--api-key", f"{_KEY},{_HOSTILE_KEY}")


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split()))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=20.0, help="time between kills")
    parser.add_argument("--streams", type=int, default=6, help="streams at a time")
    parser.add_argument("--hostile", type=int, default=2, help="clients of a second key that ask for all they can get")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_system(Path(folder), *_LAYOUT, *_KEYS, "--kv-memory-gb", "0.1", port=_two_ports()) as system,
    ):
        system.wait_usable(2, 2)
        problems = asyncio.run(_run(system, arguments))
        log = system.log_file.read_text(errors="replace")
    problems += [f"in the log: {line[:200]}" for line in log.splitlines() if "Traceback" in line][:5]
    if problems:
        Path(tempfile.gettempdir(), "kvrelay-soak.log").write_text(log)
    for problem in problems[:20]:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


async def _run(system: System, arguments: argparse.Namespace) -> list[str]:
    rng, started_s = random.Random(arguments.seed), time.monotonic()
    urls = [entry["address"] for entry in system.processes() if entry["role"] == "router"]
    redis_url = system.process("redis")["address"]  # later it may be missing, while it is restarted
    clients = Clients(urls, _KEY, arguments.streams, arguments.seed)
    await clients.begin()
    hostile = Hostile(urls, _HOSTILE_KEY, arguments.hostile, arguments.seed)
    running = asyncio.gather(clients.run(), hostile.run())
    samples: list[tuple[float, dict[str, float]]] = []
    kills: Counter[str] = Counter()
    next_kill_s = time.monotonic() + _QUIET_S
    end_s = time.monotonic() + 60 * arguments.minutes
    while (now_s := time.monotonic()) < end_s and not running.done():
        if now_s >= next_kill_s:
            kills[_kill(system, rng)] += 1
            next_kill_s += arguments.every_s
        if now_s - started_s > _QUIET_S:
            samples.append((now_s - started_s, sample(system.supervisor.pid, redis_url)))
        await asyncio.sleep(_SAMPLE_S)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    grown = growth(samples)
    report = {
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - started_s) / 60, 1),
        "kills": dict(kills),
        "clients": dict(clients.counts),
        "hostile": dict(hostile.counts),
        "slowest_answer_s": round(clients.slowest_s, 1),
        "growth": [asdict(each) for each in grown],
        "problems": clients.problems,
    }
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps(report, indent=1))
    print(
        json.dumps(
            {key: report[key] for key in ("minutes", "kills", "clients", "hostile", "slowest_answer_s")}, indent=1
        )
    )
    print(f"{'':26} {'first third':>12} {'last third':>12} {'per minute':>12}")
    for each in grown:
        print(f"{each.name:26} {each.first:12.1f} {each.last:12.1f} {each.per_minute:+12.2f}")
    return clients.problems + [
        f"{each.name} grew from {each.first:.1f} to {each.last:.1f}" for each in grown if not each.is_flat
    ]


def _kill(system: System, rng: random.Random) -> str:
    """kill -9 of one service, or of one rank of a node; its name."""
    victim = rng.choice(system.processes())
    name, pid = victim["name"], victim["pid"]
    if victim["role"] == "decode" and rng.random() < 0.5 and (ranks := ranks_of(pid)):
        name, pid = f"a rank of {name}", rng.choice(ranks)
    with contextlib.suppress(ProcessLookupError):  # it is being restarted
        os.kill(pid, signal.SIGKILL)
    return name


def _two_ports() -> int:
    """The first of two ports in a row that were free a moment ago."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError, OverflowError):
            port: int = first.getsockname()[1]
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


if __name__ == "__main__":
    sys.exit(main())
