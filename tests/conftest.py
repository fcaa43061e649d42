"""Fixtures of all tests: a real Redis, free ports, and the check that a test leaves nothing behind."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import ports, warm_start
from support.drawn import drawn
from support.flaky import FailedOnceMore
from support.paths import TESTS
from support.rank_processes import helper_pid
from support.redis_server import RedisServer
from zmq.utils.garbage import GarbageCollectorThread

from common.base.log_limits import LimitedHandler
from common.base.variables import STRICT_STATES
from common.kernels.native.build import build_library

# Before anything imports torch: test processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in [name for name in os.environ if name.startswith("KVRELAY_")]:
    del os.environ[_name]
# Examples have no deadline: other processes may delay them. The environment of the GPU tests has no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("kvrelay", deadline=None)
    settings.load_profile("kvrelay")
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
"""Time for threads, children and sockets that are ending."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """With `--budget-s` as many tests run as there is time for; the summary names the others. `--once`: see `support.flaky`."""
    parser.addoption("--budget-s", type=float, default=None, help="seconds after which no further test is begun")
    parser.addoption("--draw", default="", metavar="TEXT", help="run the tests in an order that this text determines")
    parser.addoption("--once", action="store_true", help="do not run failed tests again at the end")


def pytest_configure(config: pytest.Config) -> None:
    """Start the time budget, and let tests fork the commands of `kvrelay`."""
    warm_start.allow()
    budget_s: float | None = config.getoption("--budget-s")
    config.stash[_DEADLINE_S] = math.inf if budget_s is None else time.monotonic() + budget_s
    if not config.getoption("--once") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedOnceMore(config))


def pytest_sessionstart() -> None:
    """Compile the native kernels if their sources have changed; without a compiler the tests run on PyTorch alone."""
    build_library(_COMPILE_S)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test once the budget is spent."""
    if time.monotonic() > item.config.stash[_DEADLINE_S]:
        pytest.skip(_LEFT_OUT)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Distribute tests over workers (`-n`) as `support.distribution` says."""
    from support.distribution import WaitsBesideComputation

    return WaitsBesideComputation(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest, so that parallel runs end together; with `--draw`, in a drawn order."""
    if seed := config.getoption("--draw"):
        items[:] = drawn(items, seed)
    else:
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
    """A TCP port on which nothing listens."""
    return ports.free_port()


@pytest.fixture
def ports_in_a_row() -> Callable[[int], list[int]]:
    """`ports_in_a_row(count)`: consecutive TCP ports on which nothing listens."""
    return ports.ports_in_a_row


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a service that ran in this process did to logging."""
    yield
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, LimitedHandler)]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread or a listening socket, or the flushing of denormals switched on."""
    before = _belongings()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := sorted(set(_belongings().values()) - set(before.values())):
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(left))
        time.sleep(0.02)
    assert math.ulp(0.0) * 1.0 > 0, "this test left the flushing of denormal numbers on"


def _belongings() -> dict[str, str]:
    """Child processes, threads and listening sockets of this process, by identity."""
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
