"""A benchmark's measuring process."""

from __future__ import annotations

from pathlib import Path

import pytest
from load.worker import Worker


def test_worker_finds_what_pythonpath_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card these are the kernels that were compiled ahead: without them it compiles for minutes, or measures
    what it falls back to."""
    (tmp_path / "carried.py").write_text("class Carried:\n    def answer(self):\n        return 42\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("carried:Carried")
    try:
        assert worker.call("answer") == 42
    finally:
        worker.close()
