"""The fork server forks what it has imported, and nothing once that has been replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, socket, sys
sys.path.insert(0, sys.argv[1])
import part_of_a_library
from kvrelay.up import fork_server

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    ours.close()
    fork_server.serve(theirs, [])
    os._exit(0)
theirs.close()

def ask():
    reading, writing = os.pipe()
    request = json.dumps([["python", "-m", "kvrelay", "--version"], {}, ""]).encode()
    socket.send_fds(ours, [request], [writing])
    os.close(writing)
    answer = ours.recv(fork_server.MAX_ANSWER_BYTES).decode()
    print("pid" if answer.isdigit() else answer, os.fdopen(reading).read().strip(), sep=" | ")

for _ in range(2):
    ask()
new = os.path.join(sys.argv[1], "new")
with open(new, "w") as file:
    file.write("version = 2")
os.replace(new, part_of_a_library.__file__)
ask()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_after_an_upgrade_nodes_are_not_forked_from_what_was_imported_before(tmp_path: Path) -> None:
    """They would be a mixture of both versions, and pack weights with the old code under the digest of the new one."""
    (tmp_path / "part_of_a_library.py").write_text("version = 1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("pid | kvrelay ")
    assert second == first
    assert third == "installed files were replaced since it started | "
