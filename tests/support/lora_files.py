"""Random LoRA adapters in peft's files, and models with an adapter merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.model.config import load_model_config
from common.model.lora.checkpoint import linear_shapes, open_adapter
from common.model.rank_model import RankModel


def write_adapter(
    folder: Path, model: Path, *, rank: int = 4, seed: int = 0, targets: Sequence[str] = (), **settings: Any
) -> Path:
    """An adapter of all linear layers of `model`, or of those whose names end in one of `targets`. Returns `folder`."""
    config = load_model_config(model)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(config.num_layers):
        for name, (out, inputs) in linear_shapes(config, number).items():
            if targets and not name.endswith(tuple(targets)):
                continue
            full = f"base_model.model.{config.weight_names.layer.format(number=number)}.{name}"
            tensors[f"{full}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{full}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(model: Path, adapter: Path, folder: Path, scale: float = 1.0) -> Path:
    """A copy of `model`, whose weights are in one file, with scale * B A added to its linear layers. Returns `folder`."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights, added = load_file(file), load_file(adapter / "adapter_model.safetensors")
    is_transposed = load_model_config(model).weight_names.is_transposed
    for name in [name for name in added if name.endswith("lora_A.weight")]:
        target = name.removeprefix("base_model.model.").replace("lora_A.", "")
        delta = scale * added[name.replace("lora_A", "lora_B")] @ added[name]
        weights[target] += delta.t() if is_transposed else delta
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def load_adapters(model: RankModel, folders: Iterable[Path | str]) -> None:
    """Load adapters into a rank's model, with the ids 1, 2, ..."""
    for adapter_id, folder in enumerate(folders, 1):
        checkpoint = open_adapter(Path(folder), model.config)
        model.adapters.load(adapter_id, checkpoint, checkpoint.digest(checkpoint.read()))
