"""Finding a model's directory."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from common.base.errors import ConfigError
from common.model.hub import DEMO_MODEL_PATH, model_name, resolve_model


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nothing-of-that-name", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(name)


def test_a_relative_path_becomes_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of one host find the model that another one names, wherever each was started."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert [resolve_model(each) for each in ("model", "./model", "model.gguf")] == [
        tmp_path / "model",
        tmp_path / "model",
        tmp_path / "model.gguf",
    ]
    monkeypatch.chdir("model")
    assert model_name(resolve_model(".")) == "model"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache of ORG/NAME with two commits, of which main is the second. Without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    for commit in ("a" * 40, "b" * 40):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    return repository / "snapshots"


def test_a_model_of_the_hub_has_its_name_there_in_the_api(cached: Path) -> None:
    assert resolve_model("org/name") == cached / ("b" * 40)
    assert model_name(cached / ("b" * 40)) == "org/name"


def test_a_revision_of_a_model_of_the_hub_can_be_pinned(cached: Path) -> None:
    assert resolve_model("org/name@" + "a" * 40) == cached / ("a" * 40)
    with pytest.raises(ConfigError, match="downloading it from the hub failed"):
        resolve_model("org/name@" + "c" * 40)
    with pytest.raises(ConfigError, match="names no revision"):
        resolve_model("org/name@")


def test_names_of_folders_and_files() -> None:
    assert model_name(DEMO_MODEL_PATH) == "demo"
    assert model_name(Path("/models/Qwen2.5-0.5B")) == "Qwen2.5-0.5B"
    assert model_name(Path("/models/qwen.Q8_0.gguf")) == "qwen.Q8_0"
