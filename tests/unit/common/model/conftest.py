"""Tiny checkpoints, and copies of them to break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.oracle import make_tiny


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models: one in a single file, one in shards."""
    root = tmp_path_factory.mktemp("originals")
    for name in ("llama", "qwen3"):
        make_tiny(name, root / name)
    return root


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    """A copy of the one-file model, to break."""
    return Path(shutil.copytree(originals / "llama", tmp_path / "model"))


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    """A copy of the model in shards, to break."""
    return Path(shutil.copytree(originals / "qwen3", tmp_path / "model"))
