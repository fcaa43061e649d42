"""Starts that fail; tests/integration/test_offline.py has whole clusters."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from kvrelay.local_cluster import ClusterFailed, LocalCluster


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("KVRELAY_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_a_wrong_option_value_is_a_configuration_error(own_folder: Path) -> None:
    with pytest.raises(ConfigError, match="the local cluster ended: kv_blocks must be at least 2, not 1"):
        LocalCluster(["--kv-blocks", "1"])
    assert not list(own_folder.iterdir())


def test_an_unknown_option_ends_it_too() -> None:
    with pytest.raises(ClusterFailed, match="the local cluster ended"):
        LocalCluster(["--enable-magic"])
