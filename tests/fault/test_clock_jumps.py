"""The wall clock of a whole host jumps, as after a suspended laptop or a wrong time server, while nodes are killed.

The processes' own clock is replaced, not the kernel's: every `time.time()` and `datetime.now()` of the services follows a file.
Redis expires leases by its own clock, and has tests of its own (test_redis_outages.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.system import System, running_system, wait_until

_CLOCK = """
import datetime, os, time
_real, _file = time.time, os.environ["TEST_CLOCK_FILE"]

def _now():
    with open(_file) as file:
        return _real() + float(file.read() or 0)

time.time = _now
_datetime = datetime.datetime

class Datetime(_datetime):
    @classmethod
    def now(cls, tz=None):
        return _datetime.fromtimestamp(_now(), tz)

datetime.datetime = Datetime
"""
HOUR, YEAR = 3600, 31_536_000


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """A file with the seconds by which the services' clock is wrong."""
    (tmp_path / "sitecustomize.py").write_text(_CLOCK)
    (tmp_path / "offset").write_text("0")
    return tmp_path / "offset"


@pytest.fixture
def system(tmp_path: Path, clock: Path) -> Iterator[System]:
    env = {"PYTHONPATH": str(tmp_path), "TEST_CLOCK_FILE": str(clock)}
    with running_system(tmp_path, "--kv-memory-gb", "0.05", "--local-prefill-tokens", "0", env=env) as system:
        system.wait_usable()
        yield system


def answer(system: System) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    found = httpx.post(f"{system.url}/v1/completions", json=body, timeout=30)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"]


@pytest.mark.thorough
@pytest.mark.parametrize("jump", [HOUR, -HOUR, YEAR, -YEAR], ids=["+1 h", "-1 h", "+1 year", "-1 year"])
def test_answers_go_on_and_killed_nodes_come_back(system: System, clock: Path, jump: int) -> None:
    expected = answer(system)
    clock.write_text(str(jump))
    for _ in range(5):
        assert answer(system) == expected
    for role in ("prefill", "decode", "router"):
        pid = system.kill(role, number=signal.SIGKILL)
        wait_until(lambda role=role, pid=pid: system.is_restarted(role, pid), 30, f"another {role}", system.log_tail)
        system.wait_usable(timeout_s=30)
        assert answer(system) == expected
    system.wait_whole()
