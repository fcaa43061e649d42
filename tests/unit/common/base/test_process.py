"""Processes end quickly, with all their output and the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import ROOT

from common.base.process import SAME_SIGNAL_S, module_command


@pytest.mark.parametrize(
    ("code", "status", "error"), [("None", 0, ""), ("0", 0, ""), ("78", 78, ""), ("'no parent'", 1, "no parent\n")]
)
def test_output_and_exit_code_are_those_of_sys_exit(code: str, status: int, error: str) -> None:
    said = "x" * 10_000  # more than a buffer that nobody flushes holds back
    program = (
        f"import sys; from common.base.process import end_process; sys.stdout.write('{said}'); end_process({code})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, said, error)


@pytest.mark.parametrize(("code", "status"), [("0", 120), ("3", 3)])
def test_lost_output_is_not_success(code: str, status: int) -> None:
    program = f"from common.base.process import end_process; print('x'); end_process({code})"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (status, b"")


def test_a_process_without_standard_output_keeps_its_exit_code_and_can_fork() -> None:
    program = (
        "from common.node.ranks.forked import ForkedRank; from common.base.process import end_process\n"
        "fork = ForkedRank(lambda *_: None); fork.begin({}, 1, ''); end_process(fork.wait(30) + 7)"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, program], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (7, b"")


def test_a_closed_pipe_does_not_keep_the_process_from_ending() -> None:
    program = "from common.base.process import end_process; print('x' * 100); end_process(3)"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 3
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_service_ends_the_compiler_that_it_waits_for() -> None:
    program = """
import subprocess
from common.base.process import end_process, on_own_thread, run_service
compiler = ["sh", "-c", "trap 'sleep 0.2; kill $!; echo ended; exit 1' TERM; sleep 60 & echo compiles; wait"]
run_service(lambda: on_own_thread(lambda: subprocess.run(compiler), "start"))
print("node ended")
end_process(0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiles\n"
        process.send_signal(signal.SIGTERM)
        # To the end of the output that the compiler shares. It was waited for, as it takes its own children with it.
        assert process.communicate(timeout=30)[0] == "ended\nnode ended\n"
        assert process.returncode == 0


SERVICE = """
import asyncio, signal
from common.base.process import end_process, run_service
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be run under nohup
async def serve():
    try:
        print("serves", flush=True)
        await asyncio.sleep(60)
    finally:
        print("ends", flush=True)
        await asyncio.sleep(float(WAIT_S))
        print("ended", flush=True)
run_service(serve)
end_process(0)
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_service_ends_in_order_and_a_signal_that_is_sent_twice_does_not_interrupt_that(first: signal.Signals) -> None:
    program = "from common.base import process; process.SAME_SIGNAL_S = 60\n" + SERVICE.replace("WAIT_S", "0.2")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        process.send_signal(first)
        assert process.stdout.readline() == "ends\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "ended\n"
        assert process.returncode == 0


def test_a_later_signal_interrupts_an_end_that_takes_long() -> None:
    program = SERVICE.replace("WAIT_S", "60")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ends\n"
        time.sleep(SAME_SIGNAL_S + 0.1)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == ""
        assert process.returncode == 0


def test_a_service_under_nohup_goes_on_without_its_terminal() -> None:
    program = SERVICE.replace("SIG_DFL", "SIG_IGN").replace("WAIT_S", "0")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "ends\nended\n"
        assert process.returncode == 0


def test_a_zombie_child_is_not_waited_for() -> None:
    """Such as the forked ranks of a node whose port is taken, which must report that at once."""
    program = """
import os, subprocess, time
from common.base.process import end_children
child = subprocess.Popen(["sleep", "60"])
began_s = time.monotonic()
end_children(os.getpid())
print(time.monotonic() - began_s < 0.9, child.wait(10))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True -15\n", "")


AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not share cores between sessions")
@pytest.mark.parametrize(("leads", "niceness"), [(True, "nice 5"), (False, "nice 0")])
def test_niceness_counts_beside_other_sessions_if_the_process_leads_its_own(leads: bool, niceness: str) -> None:
    program = (
        "from pathlib import Path; from common.base.process import prepare_compute\n"
        f"prepare_compute(None, 5); print(Path('{AUTOGROUP}').read_text(), Path('/proc/self/stat').read_text().split()[18])"
    )
    command = [sys.executable, "-c", program]
    if not leads:
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, start_new_session=True)
    assert niceness in done.stdout
    assert done.stdout.rstrip().endswith(" 5"), "niceness within the session"


@pytest.mark.parametrize("installed", [True, False])
def test_a_module_of_ours_is_run_whatever_lies_in_the_working_folder(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "typer.py").write_text("raise SystemExit('not a library')")
    folder = tmp_path if installed else ROOT
    environ = {"PATH": os.environ["PATH"], **({"PYTHONPATH": str(ROOT)} if installed else {})}
    monkeypatch.chdir(folder)
    command = module_command("kvrelay", "--version")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kvrelay")
