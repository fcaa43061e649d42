"""Files behind the memory that ranks share: none is left when the ranks that made it have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.parallel import futex
from common.parallel.shared_memory import Segment

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="ranks share memory on x86-64 Linux only")

ENDS_WHILE_OTHERS_ATTACH = """
import os, sys
from pathlib import Path
from common.parallel import futex
from common.parallel.shared_memory import Segment
futex.SHM_DIR = Path(sys.argv[1])
Segment(0, 2)
os._exit(0)
"""


def test_a_segment_whose_rank_ended_while_others_attached_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futex, "SHM_DIR", tmp_path)
    subprocess.run([sys.executable, "-c", ENDS_WHILE_OTHERS_ATTACH, str(tmp_path)], check=True, timeout=60)
    (left,) = tmp_path.iterdir()
    mine = Segment(0, 2)
    assert len(list(tmp_path.iterdir())) == 2, "a young one may be about to be locked"
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    other = Segment(0, 2)
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, other.name}, f"{left} is stale"
    Segment(1, 2, mine.name).close()
    for segment in (mine, other):
        segment.close()
    assert not list(tmp_path.iterdir())
