"""`kvrelay up` where the address space is limited (RLIMIT_AS, `ulimit -v`), from the start or of a service that runs."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.ports import free_port
from support.system import System, running_system

_LIMIT_BYTES = 2 * 2**30


@pytest.mark.thorough
def test_kv_that_does_not_fit_the_address_space_is_refused_in_a_sentence() -> None:
    """The supervisor names the node and ends everything."""
    command = [sys.executable, "-m", "kvrelay", "up", "--model", "demo", "--port", str(free_port())]
    done = subprocess.run(
        [*command, "--kv-memory-gb", "2", "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES)),
    )
    said = done.stdout + done.stderr
    assert done.returncode == 78, said
    assert "no memory for 2.15 GB of KV: Cannot allocate memory" in said.splitlines()[-1]
    assert "Traceback" not in said


_REQUESTS, _AT_ONCE = 48, 24
_PATIENCE_S = 200.0
_MOST_AT_ONCE = 192


def ask(system: System, index: int) -> list[int] | None:
    """The answer's tokens; None if the client would have to ask again."""
    prompt = [(index * 31 + i) % 200 + 3 for i in range(10 + 40 * (index % 24))]
    body = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    try:
        answer = httpx.post(
            f"{system.url}/v1/completions", json={**body, "cache_salt": str(time.monotonic())}, timeout=60
        )
    except httpx.TransportError:
        return None
    assert answer.status_code in (200, 500, 503), answer.text
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else None


@pytest.mark.thorough
@pytest.mark.timeout(420)
@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_running_service_that_gets_no_more_memory_ends_and_is_started_again(role: str, tmp_path: Path) -> None:
    """The new one has no limit. No answer is altered."""
    with running_system(tmp_path, "--model", "demo", "--dtype", "float32", "--log-level", "warning") as system:
        system.wait_usable()
        expected = [ask(system, index) for index in range(_REQUESTS)]
        assert all(expected)
        pid = system.process(role)["pid"]
        resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms, resource.RLIM_INFINITY))
        end_s, at_once = time.monotonic() + _PATIENCE_S, _AT_ONCE
        while not system.is_restarted(role, pid):
            assert time.monotonic() < end_s, f"{role} had memory all the time"
            with ThreadPoolExecutor(at_once) as clients:
                indexes = [i % _REQUESTS for i in range(2 * at_once)]
                answers = list(clients.map(lambda index: ask(system, index), indexes))
            assert all(got in (None, expected[index]) for got, index in zip(answers, indexes, strict=True))
            at_once = min(2 * at_once, _MOST_AT_ONCE)  # what it has freed may be enough for this many
        system.wait_usable()
        system.wait_whole()
        assert [ask(system, index) for index in range(_REQUESTS)] == expected
