"""A GGUF file's metadata give the config that the Hugging Face folder has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.gguf_files import Kind, write_gguf
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.model.config import load_model_config
from common.model.files import weight_files
from common.model.gguf.config import GGUF_NAMES
from common.model.hub import resolve_model
from common.node.plan import plan_node
from router.served_model import LoadOptions, load
from router.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-linear", "qwen2", "qwen3"])
def test_the_config_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_tiny(name, tmp_path / "original")
    file, _ = write_gguf(folder, tmp_path, lambda name, weight: Kind.F32)
    assert load_model_config(file) == dataclasses.replace(load_model_config(folder), weight_names=GGUF_NAMES)


def test_nodes_and_routers_take_a_file_as_the_model(tmp_path: Path) -> None:
    file, _ = write_gguf(make_tiny("llama3", tmp_path / "original"), tmp_path, lambda name, weight: Kind.Q8_0)
    plan = plan_node(DecodeConfig(model=str(file)))
    assert (plan.path, plan.model.name, plan.dtype) == (file, "model", "bfloat16")
    assert weight_files(plan.path) == [file]
    served = load(plan.model.path, None, LoadOptions())
    assert served.name == "model"
    assert served.tokenizer_digest == plan.model.tokenizer != ""
    assert served.tokenizer.encode("w5 w7") == Tokenizer(tmp_path).encode("w5 w7")
    assert plan_node(DecodeConfig(model=str(file), quantization="int8")).layout.kv_kind != plan.layout.kv_kind


def test_a_file_without_a_tokenizer_beside_it_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file, _ = write_gguf(make_tiny("llama3", tmp_path / "original"), tmp_path, lambda name, weight: Kind.Q8_0)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        load(str(file), None, LoadOptions())


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ConfigError, match="is neither a directory nor a GGUF file"):
        resolve_model(str(tmp_path / "model.bin"))
