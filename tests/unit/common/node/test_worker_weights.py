"""A rank computes with the weights that its plan was made for, whatever was packed or replaced before."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.model.formats.base import Linear
from common.node import worker
from common.node.plan import plan_node
from common.node.worker import load_worker
from common.parallel.mesh import SOLO

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DecodeConfig:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    return DecodeConfig(model=str(make_tiny("llama", tmp_path / "model")), dtype="float32", kv_blocks=4)


def change_one_number(config: DecodeConfig) -> None:
    """In the middle of a matrix, where no fingerprint looks; size and time of the file stay as they were."""
    file = Path(config.model) / "model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    tensors[UP].view(-1)[1000] += 100.0
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def output(config: DecodeConfig) -> torch.Tensor:
    """The output of the changed layer for an input of ones."""
    loaded = load_worker(plan_node(config), SOLO, small_batches=False)
    with closing(loaded), torch.inference_mode():
        linear: Linear = loaded.adapters._linears[6]  # gate and up of the second layer
        return linear.forward(torch.ones(1, 64)).clone()


def test_weights_that_changed_in_place_are_packed_again(config: DecodeConfig) -> None:
    before = output(config)
    fingerprint = plan_node(config).layout.fingerprint
    change_one_number(config)
    assert plan_node(config).layout.fingerprint == fingerprint
    assert sorted((output(config) - before).abs().flatten().round().tolist())[-2:] == [0.0, 100.0]


@pytest.mark.parametrize("packed", [True, False])
def test_files_that_change_while_they_are_read_are_refused_and_nothing_is_kept(
    config: DecodeConfig, packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_node(config)

    def after_a_change(load: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            change_one_number(config)
            return load(*args, **kwargs)

        return changed

    if not packed:
        monkeypatch.setattr(worker, "open_packed_weights", lambda *_: None)
    monkeypatch.setattr(worker, "load_model", after_a_change(worker.load_model))
    with pytest.raises(ConfigError, match="changed while they were read; start the node again"):
        load_worker(plan, SOLO, small_batches=False)
    files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.stat().st_size]
    assert [
        file for file in files if file.name != "name"
    ] == []  # how `kvrelay cache list` shows the folder is no weight
