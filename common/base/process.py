"""How our processes hang together: a child never outlives its parent, a service ends in order.

Imports nothing but the standard library, because this file is also run by itself as the little launcher that
ties a foreign program (Redis) to its parent: `python -I -S process.py PARENT_PID program arguments...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_OUTPUT_LOST = 120
_CHILDREN_END_S = 1.0


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere nothing happens).

    `parent_pid` is who the parent must be: if it died before we got here, this process ends at once. Without
    it, the environment's KVRELAY_SUPERVISOR_PID is taken; where that is not set, nothing happens. Must be
    called in the main thread. The kernel tracks the parent's *thread* that started us, so supervisors start
    children from a thread that lives as long as they do.
    """
    if parent_pid is None:
        marker = os.environ.get("KVRELAY_SUPERVISOR_PID", "")
        if not marker.isdigit():
            return
        parent_pid = int(marker)
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"the process {parent_pid} that started this one is gone")


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` show of the calling process (Linux, 15 characters); its command line stays."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def tied_command(argv: list[str]) -> list[str]:
    """The command that runs `argv` as a child that dies with the calling process. Its pid is the program's own."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def prepare_compute(threads: int | None, nice: int) -> None:
    """Settle how this process shares the machine. Must run before anything imports torch.

    OpenMP threads wait passively: teams of two processes that spin on the same cores make each other's steps
    slower by an order of magnitude. An explicit setting in the environment wins.

    Raises: ConfigError where a negative `nice` is not permitted.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if nice:
        try:
            os.nice(nice)
        except OSError as error:
            # Not at the top: this file also runs by itself, without the package on its path.
            from common.base.errors import ConfigError

            raise ConfigError(f"cannot add {nice} to the niceness of this process: {error.strerror}") from error


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Import modules that stay: the garbage collector looks at them neither meanwhile nor ever after.

    Going through a hundred thousand objects that stay takes tens of milliseconds, in which nothing moves.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def flush_output() -> bool:
    """Write out what standard output and standard error hold back. Returns whether it is where it should be."""
    whole = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # None: closed when this process began
            continue
        try:
            stream.flush()
        except OSError:
            whole = False
    return whole


def end_process(code: str | int | None) -> NoReturn:
    """End as `sys.exit` does with this code, but without taking the interpreter down object by object: with torch in it
    that takes a second, in which the node's successor waits. Whoever holds something must have closed it by now.

    Like the interpreter, ends with 120 instead of 0 where output was lost: a full disk must not pass for success.
    """
    status = 1
    try:
        if isinstance(code, str):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                print(code, file=sys.stderr)
        else:
            status = code or 0
        if not flush_output():
            status = status or _OUTPUT_LOST
    finally:
        os._exit(status)


def allow_files(count: int) -> int:
    """Have this process open so many files and sockets, as far as the system lets it. Returns how many of these it may."""
    endless = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == endless else min(count, hard)
    if soft != endless and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def end_children(pid: int) -> None:
    """SIGTERM to what process `pid` has started and is still there, such as the compilers of a node's kernels, which know
    nothing of `die_with_parent` (Linux). Waits for them a moment: ninja needs one to end its own, which are in other
    process groups than ours."""
    told: set[int] = set()
    until_s = time.monotonic() + _CHILDREN_END_S
    while (children := _children(pid)) and time.monotonic() < until_s:
        for child in children - told:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGTERM)
        told |= children
        time.sleep(0.01)


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                found |= {child for child in map(int, children.read().split()) if _runs(child)}
    return found


def _runs(pid: int) -> bool:
    """False also for what has ended and was not asked for its exit code."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return not stat.read().rpartition(b")")[2].startswith(b" Z")
    return False


def run_service(
    serve: Callable[[], Coroutine[Any, Any, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a service's coroutine until it returns; SIGTERM or SIGINT cancels it, which is an orderly end. Whatever it has
    started ends with it."""

    async def main() -> None:
        task = asyncio.ensure_future(serve())
        loop = asyncio.get_running_loop()
        stopping = False

        def stop() -> None:
            nonlocal stopping
            stopping = True
            task.cancel()

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop)
        try:
            await task
        except asyncio.CancelledError:
            if not stopping:
                raise

    try:
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
    finally:
        end_children(os.getpid())


async def on_own_thread(work: Callable[[], None], name: str) -> None:
    """Run `work` beside the loop. Unlike with `asyncio.to_thread`, who stops waiting, by a deadline or a cancellation,
    leaves it behind: neither the loop's end nor the process's waits for it.

    Raises: what `work` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        outcome: BaseException | None = None
        try:
            work()
        except BaseException as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    await done


def _launch(arguments: list[str]) -> None:
    die_with_parent(int(arguments[0]))
    os.execv(arguments[1], arguments[1:])


if __name__ == "__main__":
    _launch(sys.argv[1:])
