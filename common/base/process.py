"""Process lifecycle: a child never outlives its parent, and a service stops in order.

Imports only the standard library, because this file also runs on its own as the launcher that ties another program
(Redis) to its parent: `python -I -S process.py PARENT_PID program arguments...`.
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
import traceback
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_OUTPUT_LOST = 120
_CHILDREN_END_S = 1.0
SAME_SIGNAL_S = 0.5
"""A second signal within this time counts as the same one, because programs such as `timeout` send a signal twice."""
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
"""The folder that our packages are imported from."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies (Linux; elsewhere nothing happens).

    `parent_pid` is the expected parent, by default KVRELAY_SUPERVISOR_PID from the environment; without either, nothing
    happens. If the parent has already died, this process ends at once. Must be called in the main thread. The kernel
    tracks the *thread* that started this process, so supervisors start children from a thread that lives as long as
    they do.
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


def open_standard_streams() -> None:
    """Open /dev/null as standard input, output and error where they are closed.

    Otherwise the next socket would get their descriptor, which an event loop must not close. Call it before any file is
    opened for good.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            errors = "backslashreplace" if name == "stderr" else None
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False))  # noqa: SIM115 - open until the end


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the system's start (Linux); None if unknown. It distinguishes a process
    from a later one with the same id."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])
    return None


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own (Linux). Raises: OSError where that is not possible."""
    if not sys.platform.startswith("linux") or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this process cannot adopt orphans")


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show (Linux, 15 characters); the command line stays."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def set_command_line(argv: list[str]) -> None:
    """Set the command line that `ps -f` shows (Linux), cut to the length of the present one."""
    with contextlib.suppress(OSError), open("/proc/self/stat", "rb") as stat, open("/proc/self/cmdline", "rb") as shown:
        fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
        room, present = end - start, shown.read()
        if start and room > 1 and ctypes.string_at(start, len(present)) == present:
            text = os.fsencode(" ".join(argv))[: room - 2]
            # A last byte other than NUL tells the kernel that the text ends at the first NUL.
            ctypes.memmove(start, text.ljust(room - 1, b"\0") + b" ", room)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules.

    `python -m` looks for modules in the working folder first, where a file of a user or of a model could have the name of a
    module of ours or of a library. `-P` prevents that, unless we ourselves are imported from the working folder.
    """
    from_here = False
    with contextlib.suppress(OSError):
        from_here = os.path.samefile(os.curdir, _ROOT)
    return [sys.executable, *([] if from_here else ["-P"]), "-m", module, *arguments]


def tied_command(argv: list[str]) -> list[str]:
    """The command that runs `argv` as a child that dies with the calling process. The child's pid is that of the program."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def prepare_compute(threads: int | None, nice: int) -> None:
    """Set how this process shares the machine. Must run before anything imports torch.

    OpenMP threads wait passively: if the threads of two processes spin on the same cores, they slow each other's steps
    down by an order of magnitude. An explicit setting in the environment takes precedence.

    Raises: ConfigError if a negative `nice` is not permitted.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if nice:
        try:
            os.nice(nice)
        except OSError as error:
            # Not at the top: this file also runs on its own, without the package on its path.
            from common.base.errors import ConfigError

            raise ConfigError(f"cannot add {nice} to the niceness of this process: {error.strerror}") from error
        _set_niceness_of_session(nice)


def _set_niceness_of_session(nice: int) -> None:
    """Set the niceness of the session that this process leads, if it leads one, as the children of `kvrelay up` do. If Linux
    shares cores between sessions (sched_autogroup_enabled), a process's own niceness counts only within its session."""
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
            autogroup.write(str(nice))


@contextlib.contextmanager
def lasting_imports() -> Generator[None]:
    """Exclude the objects of the modules imported in the `with` block from garbage collection, now and later.

    Traversing a hundred thousand permanent objects would pause the process for tens of milliseconds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def flush_output() -> bool:
    """Flush standard output and standard error. Returns whether everything was written."""
    complete = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # None: closed before this process started
            continue
        try:
            stream.flush()
        except OSError:
            complete = False
    return complete


def end_process(code: str | int | None) -> NoReturn:
    """End like `sys.exit` with this code, but without tearing down the interpreter.

    With torch loaded, teardown takes a second in which the node's successor waits. All resources must be closed by now.
    Like the interpreter, the exit code is 120 instead of 0 if output was lost: a full disk must not look like success.
    """
    status = 1
    try:
        if isinstance(code, str):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                print(code, file=sys.stderr)
        else:
            status = code or 0
        if not flush_output():
            status = status or _OUTPUT_LOST
    finally:
        os._exit(status)


def run_and_end(work: Callable[[], None]) -> NoReturn:
    """Run `work` in a forked process and end it, so that nothing of its parent's stack runs in it. Prints an error's traceback."""
    code: str | int | None = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # whatever it is, the process ends here
        traceback.print_exc()
    finally:  # even if the traceback cannot be written
        end_process(code)


def allow_files(count: int) -> int:
    """Raise the limit of open files and sockets to `count`, if permitted. Returns how many of `count` are allowed."""
    endless = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == endless else min(count, hard)
    if soft != endless and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def end_children(pid: int) -> None:
    """Send SIGTERM to the running children of process `pid` (Linux), such as compilers of kernels, which do not call
    `die_with_parent`. Waits up to `_CHILDREN_END_S` for them: ninja needs time to end its own children, which are in
    other process groups."""
    signalled: set[int] = set()
    until_s = time.monotonic() + _CHILDREN_END_S
    while (children := _children(pid)) and time.monotonic() < until_s:
        for child in children - signalled:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGTERM)
        signalled |= children
        time.sleep(0.01)


def _children(pid: int) -> set[int]:
    running: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                running |= {child for child in map(int, children.read().split()) if _runs(child)}
    return running


def _runs(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return not stat.read().rpartition(b")")[2].startswith(b" Z")
    return False


def ending_signals() -> list[signal.Signals]:
    """The signals that end this process in order. SIGHUP, which a closed terminal sends, is left out under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


def ignore_terminal() -> None:
    """Ignore Ctrl-C and the end of the terminal. The parent receives them too, and ends this process in order."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def run_service(serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service's coroutine until it returns. SIGTERM, SIGINT or SIGHUP (except under `nohup`) cancels it, which is a
    normal end; a signal more than `SAME_SIGNAL_S` later also cancels its shutdown. Child processes end with it."""

    import uvloop

    async def main() -> None:
        task = asyncio.ensure_future(serve())
        loop = asyncio.get_running_loop()
        stopped_s: float | None = None

        def stop() -> None:
            nonlocal stopped_s
            if stopped_s is None or loop.time() > stopped_s + SAME_SIGNAL_S:
                stopped_s = loop.time()
                task.cancel()

        for signum in ending_signals():
            loop.add_signal_handler(signum, stop)
        try:
            await task
        except asyncio.CancelledError:
            if stopped_s is None:
                raise

    try:
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        end_children(os.getpid())


async def on_own_thread(work: Callable[[], None], name: str) -> None:
    """Run `work` on a thread of its own and wait for it.

    A caller that stops waiting, because of a deadline or a cancellation, leaves the thread behind: unlike with
    `asyncio.to_thread`, neither the end of the loop nor that of the process waits for it.

    Raises: all that `work` raises.
    """
    outcome = Future[None]()
    outcome.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel it

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    await asyncio.wrap_future(outcome)


def _launch(arguments: list[str]) -> None:
    die_with_parent(int(arguments[0]))
    os.execv(arguments[1], arguments[1:])  # noqa: S606 - the caller's own command


if __name__ == "__main__":
    _launch(sys.argv[1:])
