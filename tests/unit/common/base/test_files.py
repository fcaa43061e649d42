from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.paths import ROOT

from common.base.files import locked, try_lock, write_whole


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
        "import sys, time, pathlib; from common.base.files import locked\n"
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


def test_a_file_is_replaced_also_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for path, content in ((file, b"a"), (link, b"b"), (file, b"")):
        write_whole(path, content)
        assert file.read_bytes() == content
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    write_whole(file, b"a")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("may_make_files", [True, False])
def test_a_private_file_is_readable_by_its_owner_only_whatever_it_replaces(
    may_make_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: may_make_files)
    file = tmp_path / "key.pem"
    file.touch(0o644)
    write_whole(file, b"a", private=True)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"a", 0o600)


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, content: bytes) -> None:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", b"a")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_whole, args=(pipe, b"content"))
    writer.start()
    assert pipe.read_bytes() == b"content"
    writer.join()
    assert pipe.is_fifo()
