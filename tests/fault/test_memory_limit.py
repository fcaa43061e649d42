"""`kvrelay up` where the address space is limited (RLIMIT_AS, `ulimit -v`)."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from common.cluster.redis_server import free_port

_LIMIT_BYTES = 2 * 2**30


@pytest.mark.thorough
def test_kv_that_does_not_fit_the_address_space_is_refused_in_a_sentence() -> None:
    """The supervisor names the node and ends everything."""
    command = [sys.executable, "-m", "common.cli", "up", "--model", "demo", "--port", str(free_port())]
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
