"""The folder with the files of one `kvrelay up`."""

from __future__ import annotations

import os

from common.base.file_lock import try_lock
from common.tools.up.run_folder import run_folder


def test_the_folder_is_locked_against_cleaners_of_tmp_and_gone_at_the_end() -> None:
    with run_folder() as folder:
        (folder / "file").touch()
        descriptor = os.open(folder, os.O_RDONLY)
        assert not try_lock(descriptor)  # as systemd-tmpfiles asks
        os.close(descriptor)
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
