"""`kvrelay up` as a process, with a real Redis and stub services that start at once (tests/support/stub_services)."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.base.process import SAME_SIGNAL_S

TESTS = Path(__file__).parents[1]
READY = "kvrelay is ready at"


class Up:
    """A running `kvrelay up`."""

    def __init__(self, folder: Path, *args: str, **environ: str) -> None:
        self.pid_file = folder / "pids.json"
        path = f"{TESTS / 'support' / 'stub_services'}:{TESTS.parent}"
        # -P: the working folder is no place of modules, as for the command `kvrelay`.
        command = [sys.executable, "-P", "-m", "kvrelay", "up", "--pid-file", str(self.pid_file), *args]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_line(self, text: str, timeout_s: float = 30.0) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"no line with {text!r} in:\n" + "\n".join(self.lines)
            if text in line:
                return line

    def wait_end(self, timeout_s: float = 30.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def entries(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in json.loads(self.pid_file.read_text())}

    def close(self) -> None:
        self.process.kill()
        self.wait_end()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                self._queue.put(line.rstrip())
        self._queue.put(None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    running: list[Up] = []

    def go(*args: str, **environ: str) -> Up:
        running.append(Up(tmp_path, *args, **environ))
        return running[-1]

    yield go
    for up in running:
        up.close()


def all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_services_read_the_configuration_file_of_up(start, free_port, tmp_path: Path, eventually) -> None:
    (tmp_path / "k.toml").write_text("max_num_seqs = 7\n[decode]\nseed = 3\n")
    up = start("--port", str(free_port), "--config", "k.toml")
    up.wait_line(READY)
    told = lambda: sorted(line for line in up.lines if "max_num_seqs" in line)  # noqa: E731
    prefill, decode = "max_num_seqs 7, seed 0", "max_num_seqs 7, seed 3"
    assert [line.split("| ")[1] for line in told()] == [decode, prefill]
    (tmp_path / "k.toml").write_text("max_num_seqs = 9\n")
    os.kill(up.entries()["decode-0"]["pid"], signal.SIGKILL)
    eventually(lambda: len(told()) == 3)
    assert [line.split("| ")[1] for line in told()] == [decode, decode, prefill], "at its restart as at its start"


def test_modules_of_the_working_folder_are_not_taken_for_ours(start, free_port, tmp_path: Path) -> None:
    """The working folder may hold files of a user's project, or of a downloaded model, with the names of our modules."""
    for name in ("common", "router", "typer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')\n")
    up = start("--port", str(free_port))
    up.wait_line(READY)
    assert not [line for line in up.lines if "fork" in line]


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def _fork_servers(up: Up) -> dict[str, psutil.Process]:
    """By what they fork."""
    children = {" ".join(child.cmdline()): child for child in psutil.Process(up.process.pid).children()}
    servers = {line.strip().split()[-1]: child for line, child in children.items() if ".fork_server " in line}
    return {"nodes": servers["decode"], "routers": servers["router"]}


def _open_files(pid: int) -> set[str]:
    """Sockets, pipes and other files behind the descriptors of a process."""
    return {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()} - {"/dev/null"}


@on_linux
def test_forked_services_are_children_of_up_like_any_other(start, free_port) -> None:
    up = start("--port", str(free_port), "--api-key", "hush")
    up.wait_line(READY)
    of_servers = set().union(*(_open_files(server.pid) for server in _fork_servers(up).values()))
    for name in ("router", "prefill-0", "decode-0"):
        service = psutil.Process(up.entries()[name]["pid"])
        assert service.ppid() == up.process.pid
        assert os.getsid(service.pid) == service.pid
        shown = " ".join(service.cmdline())
        assert f"-m kvrelay {name.removesuffix('-0')} --" in shown
        assert name == "router" or f"--node-id {name}" in shown
        assert not _open_files(service.pid) & of_servers, "nothing of the server is left open"
    assert not [line for line in up.lines if "fork" in line]


@on_linux
@pytest.mark.parametrize(("forked", "affected"), [("nodes", ["prefill-0", "decode-0"]), ("routers", ["router"])])
def test_the_end_of_a_fork_server_affects_no_service_and_restarts_go_on(
    start, free_port, forked: str, affected: list[str]
) -> None:
    up = start("--port", str(free_port))
    up.wait_line(READY)
    before = up.entries()
    _fork_servers(up)[forked].kill()
    time.sleep(0.5)
    assert up.entries() == before
    assert all(psutil.pid_exists(entry["pid"]) for entry in before.values())
    for name in ("router", "prefill-0", "decode-0"):
        os.kill(before[name]["pid"], signal.SIGKILL)
        if name in affected:
            up.wait_line(f"{name} starts a second or two later, without the fork server")
        up.wait_line(f"{name} is ready again")
    up.process.send_signal(signal.SIGINT)
    assert up.wait_end() == 0


@on_linux
def test_what_a_dead_node_leaves_behind_does_not_stay_as_a_zombie(start, free_port, eventually) -> None:
    up = start("--port", str(free_port), STUB_DECODE="parent")
    up.wait_line(READY)
    node = psutil.Process(up.entries()["decode-0"]["pid"])
    (child,) = node.children()
    node.kill()
    up.wait_line("decode-0 is ready again")
    eventually(lambda: child.status() == psutil.STATUS_ZOMBIE or not child.is_running())
    eventually(lambda: not child.is_running())


def test_everything_starts_is_listed_and_stops_in_order(start, free_port, eventually) -> None:
    up = start("--port", str(free_port), "--prefill", "1", "--decode", "1", "--api-key", "hush")
    up.wait_line(READY)
    up.wait_line(f'curl http://127.0.0.1:{free_port}/v1/chat/completions -H "Authorization: Bearer')
    up.wait_line('"model": "stub-model"')
    entries = up.entries()
    assert [(e["name"], e["role"]) for e in entries.values()] == [
        ("redis", "redis"),
        ("router", "router"),
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
    ]
    assert entries["router"]["address"] == f"http://127.0.0.1:{free_port}"
    assert entries["redis"]["address"].startswith("redis://127.0.0.1:")
    assert entries["decode-0"]["address"].startswith("tcp://127.0.0.1:")
    assert any(line.startswith("router") and line.endswith("| hello") for line in up.lines)
    assert not [p for e in entries.values() for p in psutil.Process(e["pid"]).cmdline() if "hush" in p]
    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0
    said = [line.split()[0] for line in up.lines if line.endswith("| bye")]
    assert said == ["router", "prefill-0", "decode-0"]
    eventually(lambda: all_gone([e["pid"] for e in entries.values()]))
    assert not up.pid_file.exists()


def test_ctrl_c_in_a_terminal_stops_in_order_too(start, free_port) -> None:
    up = start("--port", str(free_port))
    up.wait_line(READY)
    os.killpg(up.process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    assert up.wait_end() == 0
    assert [line.split()[0] for line in up.lines if line.endswith("| bye")] == ["router", "prefill-0", "decode-0"]


@contextmanager
def hangup_signal(action: signal.Handlers) -> Iterator[None]:
    """Set the SIGHUP disposition that children inherit, whatever the shell of the tests has set."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_lost_terminal_stops_everything_in_order_except_under_nohup(start, free_port) -> None:
    with hangup_signal(signal.SIG_IGN):  # as nohup does
        up = start("--port", str(free_port))
    up.wait_line(READY)
    up.process.send_signal(signal.SIGHUP)
    os.kill(up.entries()["decode-0"]["pid"], signal.SIGKILL)
    up.wait_line("decode-0 is ready again")
    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0

    with hangup_signal(signal.SIG_DFL):
        up = start("--port", str(free_port))
    up.wait_line(READY)
    up.process.send_signal(signal.SIGHUP)
    up.wait_line("SIGHUP: stopping")
    assert up.wait_end() == 0


def test_killed_children_are_restarted_under_their_names_and_the_pid_file_follows(start, free_port, eventually) -> None:
    up = start("--port", str(free_port))
    up.wait_line(READY)
    for name in ("prefill-0", "decode-0", "router", "redis"):
        before = up.entries()
        os.kill(before[name]["pid"], signal.SIGKILL)
        up.wait_line(f"{name} ended (signal 9); restarting it now")
        up.wait_line(f"{name} is ready again")
        eventually(lambda name=name: up.entries()[name]["address"])
        after = up.entries()
        assert after[name]["pid"] != before[name]["pid"]
        others = set(before) - {name}
        assert {n: after[n]["pid"] for n in others} == {n: before[n]["pid"] for n in others}
    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0


def test_a_redis_that_stands_still_is_restarted(start, free_port) -> None:
    """No node that died after it ever came back: what it registered was not seen."""
    up = start("--port", str(free_port))
    up.wait_line(READY)
    os.kill(up.entries()["redis"]["pid"], signal.SIGSTOP)
    up.wait_line("redis does not answer", timeout_s=60.0)
    up.wait_line("redis is ready again", timeout_s=60.0)
    os.kill(up.entries()["decode-0"]["pid"], signal.SIGKILL)
    up.wait_line("decode-0 is ready again", timeout_s=60.0)


def test_child_that_cannot_start_ends_everything_with_its_message_and_exit_code(start, free_port) -> None:
    up = start("--port", str(free_port), STUB_DECODE="refuse")
    assert up.wait_end() == 78
    assert up.lines[-1] == (
        "kvrelay: decode-0 could not start (exit code 78): the model folder /nowhere does not exist"
    )
    assert not [line for line in up.lines if "Traceback" in line]
    assert not up.pid_file.exists()


def test_start_that_takes_too_long_reports_what_it_waits_for(start, free_port) -> None:
    up = start("--port", str(free_port), "--start-timeout-s", "4", STUB_DECODE="hang")
    assert up.wait_end() == 1
    assert "still waiting for decode-0" in up.lines[-1]


def test_restarted_child_that_never_becomes_ready_is_killed_and_restarted(start, free_port, tmp_path) -> None:
    obstacle = tmp_path / "obstacle"
    up = start("--port", str(free_port), "--start-timeout-s", "8", STUB_DECODE=f"hang-if:{obstacle}")
    up.wait_line(READY)
    obstacle.touch()
    os.kill(up.entries()["decode-0"]["pid"], signal.SIGKILL)
    up.wait_line("decode-0 is not ready after 8 s")
    obstacle.unlink()
    up.wait_line("decode-0 is ready again")
    assert len([line for line in up.lines if "is not ready after" in line]) == 1
    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0


def test_port_in_use_is_reported_before_anything_starts(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        up = start("--port", str(holder.getsockname()[1]))
        assert up.wait_end() == 78
    assert len(up.lines) == 1
    assert "cannot listen on 127.0.0.1:" in up.lines[0]


def test_too_little_memory_for_all_nodes_is_reported_before_anything_starts(start, free_port) -> None:
    up = start("--port", str(free_port), "--device", "cpu", "--kv-memory-gb", "100000")
    assert up.wait_end() == 78
    assert len(up.lines) == 1
    assert "200000.00 GB of memory together (prefill-0 100000.00, decode-0 100000.00)" in up.lines[0]


def test_nothing_survives_the_death_of_the_supervisor(start, free_port, eventually) -> None:
    up = start("--port", str(free_port))
    up.wait_line(READY)
    pids = [entry["pid"] for entry in up.entries().values()]
    up.process.kill()
    eventually(lambda: all_gone(pids))


def test_child_that_ignores_sigterm_is_killed_at_the_second_ctrl_c(start, free_port) -> None:
    up = start("--port", str(free_port), STUB_PREFILL="stubborn")
    up.wait_line(READY)
    pids = [entry["pid"] for entry in up.entries().values()]
    up.process.send_signal(signal.SIGTERM)
    up.wait_line("stopping")
    time.sleep(SAME_SIGNAL_S + 0.1)
    up.process.send_signal(signal.SIGTERM)
    up.wait_line("killing prefill-0", 5)
    assert up.wait_end(15) == 0
    assert all_gone(pids)


def test_existing_redis_is_used_and_left_running(start, free_port, redis_server, cluster) -> None:
    up = start("--port", str(free_port), "--redis-url", redis_server.url, "--cluster", cluster)
    up.wait_line(READY)
    assert "redis" not in up.entries()
    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0
    assert psutil.pid_exists(redis_server.pid)
