"""The folder with the files of one `kvrelay up`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.base.files import try_lock
from kvrelay.up.run_folder import run_folder


def test_the_folder_is_locked_against_cleaners_of_tmp_and_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_folder() as folder:
        (folder / "file").touch()
        descriptor = os.open(folder, os.O_RDONLY)
        assert not try_lock(descriptor)  # as systemd-tmpfiles asks
        os.close(descriptor)
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_folders_of_killed_runs_are_removed_and_those_of_running_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_folder() as running:
        killed, other = tmp_path / "kvrelay-up-killed", tmp_path / "kvrelay-up-other"
        for folder in (killed, other):
            folder.mkdir()
        (killed / "locked").touch()  # its lock ended with its process; `other` never had one
        with run_folder() as new:
            assert sorted(tmp_path.iterdir()) == sorted([running, other, new])
