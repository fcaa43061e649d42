"""A model folder for the stub nodes of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stub_node import make_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights."""
    return make_model_folder(tmp_path_factory.mktemp("model"))
