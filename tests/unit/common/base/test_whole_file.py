"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from common.base.whole_file import write_whole


def test_a_file_is_replaced_also_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for path, content in ((file, b"a"), (link, b"b"), (file, b"")):
        write_whole(path, content)
        assert file.read_bytes() == content
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_whole, args=(pipe, b"content"))
    writer.start()
    assert pipe.read_bytes() == b"content"
    writer.join()
    assert pipe.is_fifo()
