from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.paths import ROOT

from common.base.file_lock import locked, try_lock


def soon_s(seconds: float = 0.05) -> float:
    return time.monotonic() + seconds


def test_a_held_lock_excludes_others_until_their_deadline(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with locked(file, soon_s()) as first, locked(file, soon_s()) as second:
        assert (first, second) == (True, False)
    with locked(file, soon_s()) as again:
        assert again


def test_shared_holders_exclude_only_an_exclusive_one(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.touch()
    readers = [os.open(file, os.O_RDONLY) for _ in range(2)]
    assert all(try_lock(reader, shared=True) for reader in readers)
    with locked(file, soon_s()) as held:
        assert not held
    for reader in readers:
        os.close(reader)
    with locked(file, soon_s()) as held:
        assert held


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    code = (
        "import sys, time, pathlib; from common.base.file_lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), time.monotonic()): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(file)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with locked(file, soon_s()) as held:
        assert not held
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with locked(file, soon_s(10.0)) as held:
        assert held
