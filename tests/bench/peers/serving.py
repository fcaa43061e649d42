"""Starts a server of the OpenAI API as a child process, waits until it serves, and ends it with all its children."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from bench.peers.environments import Unavailable, reason_in

from common.base.process import tied_command

_START_S = 600.0
"""vLLM compiles its model at the first start."""
_STOP_S = 20.0


@contextlib.contextmanager
def serving(command: Sequence[str], env: Mapping[str, str], url: str, log: Path) -> Iterator[None]:
    """Run `command`, which serves at `url`, until the block ends. Raises: Unavailable if it does not come to serve."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            tied_command([shutil.which(command[0]) or command[0], *command[1:]]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        _wait_until_it_serves(process, url, log)
        yield
    finally:
        _stop(process)


def _wait_until_it_serves(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            said = reason_in(log.read_text("utf-8", errors="replace"))
            raise Unavailable(f"it ended with code {process.returncode}: {said}; see {log}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise Unavailable(f"it did not serve within {_START_S:g} s; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it; then kill what is left of its process group."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
