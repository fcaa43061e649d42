"""Which models `kvrelay up` serves, and what is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.config.service_configs import UpConfig
from common.config.sources import resolve
from common.control.messages import Task
from common.model.hub import CONFIG_FILES, DEMO_MODEL_PATH
from kvrelay.up import models
from kvrelay.up.models import UpModel, find_models

TASKS: tuple[tuple[str, Task], ...] = (("gen", "generate"), ("bert", "embed"), ("gen2", "embed"))
CLASSES = {"gen": "LlamaForCausalLM", "gen2": "Qwen3ForCausalLM", "bert": "BertModel"}


def folders(root: Path) -> dict[str, str]:
    for name, architecture in CLASSES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return {name: str(root / name) for name in CLASSES}


def find(**flags: str) -> list[UpModel]:
    up = resolve(UpConfig, flags=flags, environ={}, file=None)
    return find_models(up.config, up.sources)


def test_each_models_task_follows_from_its_files(tmp_path: Path) -> None:
    at = folders(tmp_path)
    gen, bert, gen2 = (UpModel(at[name], task, Path(at[name])) for name, task in TASKS)
    assert find(model=f"{at['gen']},{at['bert']}") == [gen, bert]
    assert find(model=at["gen2"], task="embed") == [gen2]
    assert find() == [UpModel("demo", "generate", DEMO_MODEL_PATH)]


@pytest.mark.parametrize(
    ("models", "flags", "why"),
    [
        ("gen,gen", {}, "names two models"),
        ("gen,nowhere", {}, "model directory .*nowhere does not exist"),
        ("gen,bert", {"task": "embed"}, "--task belongs to one model, and several are served"),
        ("gen,gen2", {"lora": "a=b"}, "--lora belongs to one model that generates, and several"),
        ("gen,gen2", {"chat_template": "t"}, "--chat-template belongs to one model that generates"),
        ("bert", {"decode": "2"}, "--decode has no effect: .*bert does not generate"),
        ("bert", {"prefill": "0"}, "--prefill 0: .*bert needs prefill nodes"),
        ("gen,bert", {"prefill": "0"}, "--prefill 0: .*bert needs prefill nodes"),
        ("gen,gen2", {"planner": "apply"}, "--planner apply is for clusters of one model, which generates"),
        ("gen,bert", {"planner": "apply"}, "--planner apply is for clusters of one model"),
        ("bert", {"planner": "apply"}, "--planner apply is for clusters of one model"),
        ("gen", {"planner": "apply", "prefill": "0"}, "--planner apply needs a prefill node"),
        (
            "gen",
            {"planner": "apply", "redis_url": "redis://h"},
            "--planner apply needs the Redis that `kvrelay up` starts",
        ),
    ],
)
def test_what_fits_no_model_or_several_is_refused(tmp_path: Path, models: str, flags: dict[str, str], why: str) -> None:
    folders(tmp_path)
    with pytest.raises(ConfigError, match=why):
        find(model=",".join(str(tmp_path / name) for name in models.split(",")), **flags)


def test_a_folder_whose_name_has_a_comma_is_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "a,b"
    folder.mkdir()
    at = folders(folder)
    gen, bert = (UpModel(at[name], task, Path(at[name])) for name, task in TASKS[:2])
    assert find(model=at["gen"]) == [gen]
    assert find(model=json.dumps([at["gen"], at["bert"]])) == [gen, bert]


def test_two_folders_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        folders(tmp_path / parent)
    with pytest.raises(ConfigError, match="names two models 'gen'"):
        find(model=f"{tmp_path / 'a' / 'gen'},{tmp_path / 'b' / 'gen'}")


def test_weights_are_downloaded_before_nodes_start_and_only_if_all_options_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = folders(tmp_path)
    asked: list[str] = []

    def resolve_model(name: str, *, patterns: Sequence[str] = ()) -> Path:
        asked.append(f"{'config' if patterns == CONFIG_FILES else 'all'} of {name}")
        return Path(at[name.rpartition("/")[2]])

    monkeypatch.setattr(models, "resolve_model", resolve_model)
    find(model="hub/gen,hub/bert")
    assert asked == ["config of hub/gen", "config of hub/bert", "all of hub/gen", "all of hub/bert"]
    asked.clear()
    with pytest.raises(ConfigError):
        find(model="hub/gen,hub/bert", prefill="0")
    assert asked == ["config of hub/gen", "config of hub/bert"]


def test_options_of_one_model_are_taken_beside_a_pooling_model(tmp_path: Path) -> None:
    at = folders(tmp_path)
    assert len(find(model=f"{at['bert']},{at['gen']}", served_model_name="x", lora="a=b")) == 2
