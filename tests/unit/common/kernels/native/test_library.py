from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.kernels.native.build import find_library

STARTS_TOO_MANY_THREADS = """
import ctypes, resource, sys
library = ctypes.CDLL(sys.argv[1])
library.kv_team_new.restype = ctypes.c_void_p
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)  # for the stacks of some threads
print(library.kv_team_new(100))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_team_whose_later_threads_cannot_be_started_is_none() -> None:
    library = find_library()
    if not isinstance(library, Path):
        pytest.skip(f"no native kernels: {library}")
    command = [sys.executable, "-c", STARTS_TOO_MANY_THREADS, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
