from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from common.base.files import locked
from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights
from kvrelay.cache.cli import app, clear, list_cache


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
    assert "2.0 MB  packed weights of old-" in lines[2]
    assert "last used 0.0 hours ago" in lines[2]
    assert "in use" in lines[3]


def test_clear_keeps_only_what_is_in_use(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(PackedWeights(cache / "weights", "new", 1.0)):
        clear()
        assert [folder.name.partition("-")[0] for folder in (cache / "weights").iterdir()] == ["new"]
    assert list((cache / "native").iterdir()) == [cache / "native" / "lock"]
    clear()
    assert list((cache / "weights").iterdir()) == []
    out = capsys.readouterr().out
    assert "kept packed weights of new-" in out
    assert "removed packed weights of old-" in out
    assert out.count("removed native kernels") == 1


def test_clear_leaves_a_compiler_its_files(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without them it failed, and its node computed with PyTorch, several times slower, until the next start."""
    work = cache / "native" / "compiling-x"
    work.mkdir()
    with locked(cache / "native" / "lock", 0.0) as is_held:
        assert is_held
        clear()
    assert work.exists()
    assert "kept native kernels (being compiled)" in capsys.readouterr().out
    clear()
    assert not work.exists()
    with locked(cache / "native" / "lock", 0.0) as is_held:  # who waited for it meanwhile holds the lock of this folder
        assert is_held


def test_list_does_not_mind_files_that_a_compiler_removes_meanwhile(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "native" / "compiling-x").mkdir()
    (cache / "native" / "compiling-x" / "a.o").touch()
    walk = os.walk

    def walked(folder: Path, **options: Any) -> Iterator[Any]:
        for found in [*walk(folder, **options)]:
            shutil.rmtree(folder / "compiling-x", ignore_errors=True)
            yield found

    monkeypatch.setattr(os, "walk", walked)
    list_cache()
    assert "1.5 MB  native kernels" in capsys.readouterr().out


def test_a_cache_that_is_no_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    for command in ("list", "clear"):
        shown = CliRunner().invoke(app, [command])
        assert shown.exit_code == 78
        assert shown.stderr.count("\n") == 1


def test_an_empty_cache_is_listed_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "none"))
    list_cache()
    clear()


def test_models_are_listed_by_their_names(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(PackedWeights(cache / "weights", "new", 1.0, name="Qwen2.5-0.5B\x1b[31m")):
        list_cache()
    assert "packed weights of Qwen2.5-0.5B?[31m (in use)" in capsys.readouterr().out


def test_tokenizers_of_gguf_files_are_listed_and_cleared(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / "tokenizers" / "a").mkdir(parents=True)
    (cache / "tokenizers" / "a" / "tokenizer.json").write_bytes(bytes(200_000))
    list_cache()
    assert "0.2 MB  tokenizers of GGUF files" in capsys.readouterr().out
    clear()
    assert not (cache / "tokenizers").exists()
    assert "removed tokenizers of GGUF files" in capsys.readouterr().out
