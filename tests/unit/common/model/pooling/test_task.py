"""What a model is served for, from its files and `--task`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.config.option_groups import TaskName
from common.control.messages import Task
from common.model.pooling.task import find_task


def folder_of(folder: Path, name: str, *, modules: bool = False) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [name]}))
    if modules:
        (folder / "modules.json").write_text("[]")
    return folder


@pytest.mark.parametrize(
    ("name", "modules", "wanted", "task"),
    [
        ("BertModel", False, "auto", "embed"),
        ("BertModel", True, "embed", "embed"),
        ("RobertaForSequenceClassification", False, "auto", "score"),
        ("Qwen3ForCausalLM", False, "auto", "generate"),
        ("Qwen3ForCausalLM", True, "auto", "embed"),
        ("Qwen3ForCausalLM", True, "generate", "generate"),
        ("Qwen3ForCausalLM", False, "embed", "embed"),
        ("Qwen3Model", False, "auto", "embed"),
        ("GPT2Model", False, "auto", "embed"),
        ("Gemma3TextModel", False, "auto", "embed"),
        ("Gemma3Model", False, "auto", "generate"),
        ("GPT2LMHeadModel", False, "auto", "generate"),
        ("FalconModel", False, "auto", "generate"),
    ],
)
def test_the_task_follows_from_class_files_and_option(
    tmp_path: Path, name: str, modules: bool, wanted: TaskName, task: Task
) -> None:
    assert find_task(folder_of(tmp_path, name, modules=modules), wanted) == task


def test_a_folder_without_config_generates(tmp_path: Path) -> None:
    assert find_task(tmp_path) == "generate"


@pytest.mark.parametrize(
    ("name", "wanted", "why"),
    [
        ("BertModel", "generate", "--task generate: BertModel in .* can only embed"),
        ("BertForSequenceClassification", "embed", "can only score"),
        ("Qwen3ForCausalLM", "score", "--task score needs a cross-encoder .*, not Qwen3ForCausalLM"),
    ],
)
def test_what_a_model_cannot_do_is_refused(tmp_path: Path, name: str, wanted: TaskName, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_task(folder_of(tmp_path, name), wanted)
