"""What all tests share: a real Redis, free ports, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import warm_start
from support.paths import TESTS
from support.rank_processes import helper_pid
from support.redis_server import RedisServer
from zmq.utils.garbage import GarbageCollectorThread

from common.base import free_port as ports
from common.base.log_limits import LimitedHandler
from common.base.variables import STRICT_STATES
from common.kernels.native.build import build_library

# Before anything imports torch: test processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in [name for name in os.environ if name.startswith("KVRELAY_")]:
    del os.environ[_name]
# Weights of tests do not fill the user's cache.
os.environ["KVRELAY_PACKED_CACHE_GB"] = "0"
os.environ[STRICT_STATES] = "1"

_OF_THE_PROCESS = (GarbageCollectorThread,)
"""pyzmq's thread for zero-copy sends: started by the first of them, kept as long as the process lives."""
_ORDER = ("fault", "integration", "browser", "gpu", "property", "unit")
_LEFT_OUT = "left out: the time budget is spent"
_DEADLINE_S = pytest.StashKey[float]()
_COMPILE_S = 300.0
_GRACE_S = 5.0
"""Threads, children and sockets that are ending may take so long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--budget-s`: where everything does not fit, as much as does; the summary names the rest."""
    parser.addoption("--budget-s", type=float, default=None, help="seconds after which no further test is begun")


def pytest_configure(config: pytest.Config) -> None:
    """The budget starts with the run; commands of `kvrelay` are forked."""
    warm_start.allow()
    budget_s: float | None = config.getoption("--budget-s")
    config.stash[_DEADLINE_S] = math.inf if budget_s is None else time.monotonic() + budget_s


def pytest_sessionstart() -> None:
    """Compile the native kernels if their sources have changed; without a compiler the tests run on PyTorch alone."""
    build_library(_COMPILE_S)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a test out once the budget is spent."""
    if time.monotonic() > item.config.stash[_DEADLINE_S]:
        pytest.skip(_LEFT_OUT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that parallel runs end together."""
    items.sort(key=lambda item: _ORDER.index(item.path.relative_to(TESTS).parts[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what could not run on this machine, so that nothing is skipped silently."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(str(report.longrepr[2]) for report in skipped)
    terminalreporter.section("could not run here")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count} x {reason.removeprefix('Skipped: ')}")
    if not reasons:
        terminalreporter.line("nothing: every test that was asked for ran")
    left_out = [report.nodeid for report in skipped if _LEFT_OUT in str(report.longrepr[2])]
    for path, count in collections.Counter(test.partition("::")[0] for test in left_out).items():
        terminalreporter.line(f"left out for lack of time: {count} tests of {path}")
    if not any("gpu" in Path(arg).parts for arg in terminalreporter.config.args):
        files = len(list((Path(__file__).parent / "gpu").glob("test_*.py")))
        terminalreporter.line(f"not asked for: the {files} files of tests/gpu, which need a GPU: scripts/gpu-check")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis of this test run. A machine without any server program fails, it does not skip.

    Shared by all tests: use the `cluster` fixture's name to be alone in it, and leave it running.
    """
    with RedisServer() as server:
        yield server


@pytest.fixture
def cluster() -> str:
    """A cluster name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    return ports.free_port()


@pytest.fixture
def ports_in_a_row() -> Callable[[int], list[int]]:
    """`ports_in_a_row(count)`: consecutive TCP ports on loopback that were free a moment ago."""

    def find(count: int) -> list[int]:
        while True:
            with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
                first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for port in range(first + 1, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
                return list(range(first, first + count))

    return find


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test that runs a service in this process does to logging ends with the test."""
    yield
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, LimitedHandler)]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which a child process, a thread or a listening socket of ours is left, or this thread computes
    otherwise than before, without the smallest numbers.
    """
    before = _belongings()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := sorted(set(_belongings().values()) - set(before.values())):
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(left))
        time.sleep(0.02)
    assert math.ulp(0.0) * 1.0 > 0, "this test left the flushing of denormal numbers on"


def _belongings() -> dict[str, str]:
    """What this process holds that a test could forget to give back."""
    me = psutil.Process()
    found: dict[str, str] = {}
    children = [child for child in me.children() if child.pid not in (helper_pid(), warm_start.server_pid())]
    if warm_start.server_pid() is not None:
        children += psutil.Process(warm_start.server_pid()).children()
    for child in children:
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[f"p{child.pid}"] = f"process {child.pid} {' '.join(child.cmdline())[:120]}"
        except psutil.Error:
            continue
    for thread in threading.enumerate():
        if type(thread) in _OF_THE_PROCESS:
            continue
        if thread.is_alive() and thread is not threading.current_thread():
            found[f"t{thread.ident}"] = f"thread {thread.name} ({thread.ident})"
    for connection in me.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            found[f"s{connection.laddr}"] = f"listening socket {connection.laddr}"
    return found


@pytest.fixture
def eventually() -> Callable[[Callable[[], object], float], None]:
    """`eventually(condition, timeout_s)` returns when `condition()` is true, and fails the test if it never is."""

    def wait(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s"
            time.sleep(0.01)

    return wait
