"""`scripts/fuzz`: sends mutated messages to every interface of a local cluster, and watches that nothing but errors happens.

A case is made from the seed and its number alone: `--seed S --only TARGET:NUMBER` repeats one. After every round of cases
each process must be alive, its loop free, its memory bounded; four streams run all the time and must not change.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

import psutil  # noqa: E402
import redis  # noqa: E402
from support.system import System, running_system  # noqa: E402

from common.cluster.records import Records  # noqa: E402
from common.control.messages import NodeRecord  # noqa: E402
from common.security.tls import open_credentials  # noqa: E402
from fuzz.files import AdapterTarget, FileTarget  # noqa: E402
from fuzz.targets import (  # noqa: E402
    ControlTarget,
    DataTarget,
    HostTarget,
    HttpTarget,
    Place,
    RedisTarget,
    SharedMemoryTarget,
    Target,
)
from fuzz.tls_targets import TlsTarget, ZmtpTarget  # noqa: E402
from fuzz.watch import Service, Watch  # noqa: E402

_RESULTS = _ROOT / "bench-results" / "fuzz.json"
_ROUND = 384
"""Cases that are sent at once, one target each in turn."""
_MOST_PROBLEMS = 20
# Little memory for KV: all of its pages are there before memory is judged.
_LAYOUT = ("--model", "demo", "--decode-tp", "2", "--kv-memory-gb", "0.1")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after this many")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    parser.add_argument("--targets", default="http,hosts,control,data,zmtp,shm,redis,files,adapters,tls")
    parser.add_argument("--tls", action="store_true", help="services have certificates; `tls` is a target only then")
    parser.add_argument("--only", help="TARGET:NUMBER, to repeat one case")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_system(Path(folder), *_LAYOUT, *(["--tls"] if arguments.tls else [])) as system,
    ):
        system.wait_usable()
        report = asyncio.run(_run(system, arguments))
        log = system.log_file.read_text(errors="replace")
    for line in [line for line in log.splitlines() if "Traceback" in line][:5]:
        report["problems"].append(f"in the log: {line[:200]}")
    if report["problems"]:
        Path(tempfile.gettempdir(), "kvrelay-fuzz.log").write_text(log)
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps(report, indent=1))
    problems = report.pop("problems")
    print(json.dumps(report, indent=1))
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


async def _run(system: System, arguments: argparse.Namespace) -> dict[str, object]:
    redis_url = system.process("redis")["address"]
    tls_dir = psutil.Process(system.process("router")["pid"]).environ().get("KVRELAY_TLS_DIR")
    credentials = open_credentials(tls_dir)
    place = Place(system.url, redis_url, _records(redis_url, tls_dir), credentials)
    files, adapters = FileTarget(), AdapterTarget()
    targets: list[Target] = [
        HttpTarget(place),
        HostTarget(place),
        ControlTarget(place),
        DataTarget(place),
        SharedMemoryTarget(place),
        RedisTarget(place),
        ZmtpTarget(place),
        files,
        adapters,
        *([TlsTarget(place)] if arguments.tls else []),
    ]
    targets = [target for target in targets if target.name in arguments.targets.split(",")]
    changes = any(target.name == "redis" for target in targets)
    watch = Watch(system.url, _services(system), credentials=credentials, redis_changes=changes)
    await watch.begin()
    streaming = asyncio.create_task(watch.keep_streaming())
    counts: Counter[str] = Counter()
    started_s = time.monotonic()
    number = 0
    if arguments.only:
        name, _, only = arguments.only.partition(":")
        targets, number = [target for target in targets if target.name == name], int(only)
        await _run_case(targets[0], arguments.seed, number, watch)
        await watch.check()
    while not arguments.only and time.monotonic() < started_s + arguments.seconds and number < arguments.cases:
        cases = [(targets[n % len(targets)], n) for n in range(number, number + _ROUND)]
        await asyncio.gather(*(_run_case(target, arguments.seed, n, watch) for target, n in cases))
        counts.update(target.name for target, _ in cases)
        number += _ROUND
        known = len(watch.problems)
        await watch.check()
        if len(watch.problems) > known:
            named = ", ".join(f"{target.name}:{n}" for target, n in cases)
            watch.problems.append(f"... after cases {named}")
        if len(watch.problems) >= _MOST_PROBLEMS:
            break
    took_s = time.monotonic() - started_s
    streaming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await streaming
    files.close()
    adapters.close()
    return {
        "seed": arguments.seed,
        "cases": dict(counts),
        "cases_per_s": round(number / took_s, 1),
        "streams": watch.streams,
        "streams_tried_again": watch.retries,
        "worst_lag_ms": round(1000 * watch.worst_lag_s, 1),
        "problems": watch.problems,
    }


async def _run_case(target: Target, seed: int, number: int, watch: Watch) -> None:
    try:
        await target.send_case(random.Random(f"{seed} {target.name} {number}"))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except (
        BaseException
    ) as error:  # a reader of files raised something else than its own errors, or the target has a bug
        place = traceback.extract_tb(error.__traceback__)[-1]
        watch.problems.append(f"{target.name}:{number}: {error!r:.300} at {place.filename}:{place.lineno}")


def _records(redis_url: str, tls_dir: str | None) -> list[NodeRecord]:
    client: Any = redis.Redis.from_url(redis_url)
    records = Records("default", tls_dir)
    found = [records.decode(client.get(key)) for key in client.keys("kvrelay:*:node:*")]
    return [record for record in found if record is not None]


def _services(system: System) -> list[Service]:
    return [
        Service(entry["name"], psutil.Process(entry["pid"]), entry["address"])
        for entry in system.processes()
        if entry["role"] != "redis"
    ]


if __name__ == "__main__":
    sys.exit(main())
