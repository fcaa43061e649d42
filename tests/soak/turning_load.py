"""`scripts/soak-roles`: the load of a cluster with `--planner apply` turns from long prompts with short answers to short prompts with
long answers. Nodes change their roles; no request may fail, no token may be another one than at rest, and no node may change
twice within ten minutes."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

import httpx  # noqa: E402
from support.system import System, running_system  # noqa: E402

_RESULTS = _ROOT / "bench-results" / "soak-roles.json"
_LEAST_S, _TELL_S = 600.0, 30.0
_KINDS = 12
"""Different requests of each of the two sorts."""
_LONG, _SHORT = 900, 24
"""Tokens of a prompt."""
_FEW, _MANY = 4, 260
"""Tokens of an answer."""
_MOST_AT_ONCE = 48
_TURN_AT = 0.8
"""Share of the first sort at the start; at the end it is that of the second."""


def body(prefills: bool, index: int) -> dict[str, Any]:
    """A request of either sort; half of them are sampled."""
    prompt, answer = (_LONG, _FEW) if prefills else (_SHORT, _MANY)
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}
    tokens = [5 + (11 * index + 3 * position + position // 7) % 290 for position in range(prompt)]
    return {"prompt": tokens, "max_tokens": answer, "ignore_eos": True, "return_token_ids": True, **sampling}


@dataclass
class Load:
    """Requests that arrive at random, whether or not earlier ones have ended. The salt keeps prompts from being cached: all are
    computed."""

    url: str
    rate: float
    """Requests per second."""
    duration_s: float
    seed: int
    expected: dict[tuple[bool, int], list[int]] = field(default_factory=dict[tuple[bool, int], list[int]])
    problems: list[str] = field(default_factory=list[str])
    answered: Counter[bool] = field(default_factory=Counter[bool])
    longest_s: float = 0.0
    most_at_once: int = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=_MOST_AT_ONCE)
        async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as http:
            for prefills, index in itertools.product((True, False), range(_KINDS)):
                self.expected[prefills, index] = await self._ask(http, prefills, index, "at rest")
            await self._arrive(http)

    async def _arrive(self, http: httpx.AsyncClient) -> None:
        rng, started_s = random.Random(self.seed), time.monotonic()
        running: set[asyncio.Task[None]] = set()
        for number in itertools.count():
            await asyncio.sleep(rng.expovariate(self.rate))
            done = (time.monotonic() - started_s) / self.duration_s
            if done > 1:
                break
            prefills = rng.random() < _TURN_AT + (1 - 2 * _TURN_AT) * done
            running.add(task := asyncio.create_task(self._request(http, prefills, rng.randrange(_KINDS), str(number))))
            task.add_done_callback(running.discard)
            self.most_at_once = max(self.most_at_once, len(running))
            if len(running) >= _MOST_AT_ONCE:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)

    async def _request(self, http: httpx.AsyncClient, prefills: bool, index: int, name: str) -> None:
        asked_s = time.monotonic()
        try:
            tokens = await self._ask(http, prefills, index, name)
        except Exception as error:
            self.problems.append(f"request {name} failed: {error!r}")
            return
        self.longest_s = max(self.longest_s, time.monotonic() - asked_s)
        self.answered[prefills] += 1
        if tokens != self.expected[prefills, index]:
            self.problems.append(f"request {name} has other tokens")

    async def _ask(self, http: httpx.AsyncClient, prefills: bool, index: int, salt: str) -> list[int]:
        answer = await http.post(f"{self.url}/v1/completions", json={**body(prefills, index), "cache_salt": salt})
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]


@dataclass
class Watch:
    """Looks at the nodes' roles and at the plan."""

    system: System
    started_s: float = field(default_factory=time.monotonic)
    roles: dict[str, str] = field(default_factory=dict[str, str])
    switches: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    """(seconds, node, new role)."""
    plans: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    lacking: list[str] = field(default_factory=list[str])
    told_s: float = 0.0

    def look(self) -> None:
        now_s = round(time.monotonic() - self.started_s, 1)
        nodes = [node for node in self.system.admin("nodes")["nodes"] if node["usable"]]
        for node in nodes:
            name, role = node["node_id"], node["role"]
            if self.roles.setdefault(name, role) != role:
                self.switches.append((now_s, name, role))
                self.roles[name] = role
                print(f"{now_s:6.1f} s  {name} is a {role} node", flush=True)
        self.lacking += [
            f"no {role} node at {now_s} s" for role in ("prefill", "decode") if role not in {n["role"] for n in nodes}
        ]
        why = self.system.admin("plan")["why"]
        is_new = "changed to" in why and why not in {each for _, each in self.plans}
        if is_new:
            self.plans.append((now_s, why))
        if is_new or now_s > self.told_s + _TELL_S:
            self.told_s = now_s
            print(f"{now_s:6.1f} s  {why}", flush=True)

    def twice(self) -> list[str]:
        """Nodes that changed twice within ten minutes."""
        last: dict[str, float] = {}
        found: list[str] = []
        for at_s, name, _ in self.switches:
            if at_s - last.get(name, -math.inf) < _LEAST_S:
                found.append(f"{name} changed its role twice within ten minutes")
            last[name] = at_s
        return found


async def _run(system: System, load: Load) -> tuple[Watch, list[str]]:
    watch = Watch(system)
    running = asyncio.create_task(load.run())
    while not running.done():
        watch.look()
        await asyncio.wait([running], timeout=1.0)
    await running
    return watch, [*load.problems, *watch.twice(), *watch.lacking]


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split()))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second: near what the machine can do")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument(
        "--max-num-seqs", type=int, default=2, help="slots of a node: few, so that small loads fill them"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    options = ("--prefill", str(arguments.prefill), "--decode", str(arguments.decode), "--planner", "apply")
    options += ("--max-num-seqs", str(arguments.max_num_seqs), "--kv-memory-gb", "0.2")
    with tempfile.TemporaryDirectory() as folder, running_system(Path(folder), *options) as system:
        system.wait_usable(arguments.prefill, arguments.decode)
        load = Load(system.url, arguments.rate, 60 * arguments.minutes, arguments.seed)
        watch, problems = asyncio.run(_run(system, load))
        log = system.log_file.read_text(errors="replace")
        system.wait_whole()
    problems += [f"in the log: {line[:200]}" for line in log.splitlines() if "Traceback" in line][:5]
    result = {
        "arguments": vars(arguments),
        "cores": os.cpu_count(),
        "answered": {"long prompts": load.answered[True], "long answers": load.answered[False]},
        "longest_s": round(load.longest_s, 1),
        "most_at_once": load.most_at_once,
        "switches": watch.switches,
        "plans": watch.plans,
        "problems": problems,
    }
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if problems:
        Path(tempfile.gettempdir(), "kvrelay-soak-roles.log").write_text(log)
    for problem in problems[:20]:
        print(f"PROBLEM {problem}")
    print(f"{load.answered.total()} answers, {len(watch.switches)} changes of a role, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
