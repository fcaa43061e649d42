from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import typer

from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights
from common.tools.cache.cli import clear, list_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "kvrelay-0-0-0.so").write_bytes(bytes(1_500_000))
    with closing(PackedWeights(tmp_path / "weights", "old", 1.0)) as weights:
        weights.get("a", lambda: PackedTensors({"weight": torch.ones(500_000)}))
    return tmp_path


def test_list_shows_sizes_and_what_is_in_use(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(PackedWeights(cache / "weights", "new", 1.0)):
        list_cache()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(cache)
    assert lines[1].split() == ["1.5", "MB", "native", "kernels"]
    assert "2.0 MB  packed weights old-" in lines[2]
    assert "last used 0.0 hours ago" in lines[2]
    assert "in use" in lines[3]


def test_clear_keeps_only_what_is_in_use(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(PackedWeights(cache / "weights", "new", 1.0)):
        clear()
        assert [folder.name.partition("-")[0] for folder in (cache / "weights").iterdir()] == ["new"]
    assert not (cache / "native").exists()
    clear()
    assert list((cache / "weights").iterdir()) == []
    out = capsys.readouterr().out
    assert "kept packed weights new-" in out
    assert "removed packed weights old-" in out


def test_a_cache_that_is_no_folder_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    for command in (list_cache, clear):
        with pytest.raises(typer.Exit) as caught:
            command()
        assert caught.value.exit_code == 78
        assert capsys.readouterr().err.count("\n") == 1


def test_an_empty_cache_is_listed_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "none"))
    list_cache()
    clear()
