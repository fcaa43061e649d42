"""`scripts/fuzz`: sends changed traffic through every door of a local cluster, and watches that nothing but errors happens.

A case is made from the seed and its number alone: `--seed S --only DOOR:NUMBER` repeats one. After every round of cases
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
from fuzz.doors import ControlDoor, DataDoor, Door, HttpDoor, Place, RedisDoor, SharedMemoryDoor  # noqa: E402
from fuzz.files import FileDoor  # noqa: E402
from fuzz.tls_doors import TlsDoor, ZmtpDoor  # noqa: E402
from fuzz.watch import Service, Watch  # noqa: E402

_RESULTS = _ROOT / "bench-results" / "fuzz.json"
_ROUND = 384
"""Cases that are sent at once, one door each in turn."""
_MOST_PROBLEMS = 20
# Little memory for KV: all of its pages are there before memory is judged.
_LAYOUT = ("--model", "demo", "--decode-tp", "2", "--kv-memory-gb", "0.1")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after this many")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    parser.add_argument("--doors", default="http,control,data,zmtp,shm,redis,files,tls")
    parser.add_argument("--tls", action="store_true", help="services have certificates; `tls` is a door only then")
    parser.add_argument("--only", help="DOOR:NUMBER, to repeat one case")
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
    files = FileDoor()
    doors: list[Door] = [
        HttpDoor(place),
        ControlDoor(place),
        DataDoor(place),
        SharedMemoryDoor(place),
        RedisDoor(place),
        ZmtpDoor(place),
        files,
        *([TlsDoor(place)] if arguments.tls else []),
    ]
    doors = [door for door in doors if door.name in arguments.doors.split(",")]
    changes = any(door.name == "redis" for door in doors)
    watch = Watch(system.url, _services(system), credentials=credentials, redis_changes=changes)
    await watch.begin()
    streaming = asyncio.create_task(watch.keep_streaming())
    counts: Counter[str] = Counter()
    started_s = time.monotonic()
    number = 0
    if arguments.only:
        name, _, only = arguments.only.partition(":")
        doors, number = [door for door in doors if door.name == name], int(only)
        await _knock(doors[0], arguments.seed, number, watch)
        await watch.check()
    while not arguments.only and time.monotonic() < started_s + arguments.seconds and number < arguments.cases:
        cases = [(doors[n % len(doors)], n) for n in range(number, number + _ROUND)]
        await asyncio.gather(*(_knock(door, arguments.seed, n, watch) for door, n in cases))
        counts.update(door.name for door, _ in cases)
        number += _ROUND
        known = len(watch.problems)
        await watch.check()
        if len(watch.problems) > known:
            named = ", ".join(f"{door.name}:{n}" for door, n in cases)
            watch.problems.append(f"... after cases {named}")
        if len(watch.problems) >= _MOST_PROBLEMS:
            break
    took_s = time.monotonic() - started_s
    streaming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await streaming
    files.close()
    return {
        "seed": arguments.seed,
        "cases": dict(counts),
        "cases_per_s": round(number / took_s, 1),
        "streams": watch.streams,
        "streams_tried_again": watch.retries,
        "worst_lag_ms": round(1000 * watch.worst_lag_s, 1),
        "problems": watch.problems,
    }


async def _knock(door: Door, seed: int, number: int, watch: Watch) -> None:
    try:
        await door.knock(random.Random(f"{seed} {door.name} {number}"))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a reader of files raised something else than its own errors, or the door has a bug
        place = traceback.extract_tb(error.__traceback__)[-1]
        watch.problems.append(f"{door.name}:{number}: {error!r:.300} at {place.filename}:{place.lineno}")


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
