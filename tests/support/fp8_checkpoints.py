"""FP8 checkpoints in the published formats, made from tiny models; each with an equal float32 checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
BLOCK = (32, 48)
"""Published checkpoints have 128 x 128. This size gives partial blocks at the edges of the tiny models and of ranks."""


@dataclass(frozen=True)
class Style:
    """One published format. `spread` returns the scale of each number, [rows, columns] or broadcastable to it."""

    config: dict[str, Any]
    suffix: str
    stored_scale: Callable[[Tensor], Tensor]
    """[rows, columns] weights to the scales as the file has them."""
    spread: Callable[[Tensor, tuple[int, int]], Tensor]


def _of_tensor(weight: Tensor) -> Tensor:
    return weight.abs().amax() / 448


def _of_blocks(weight: Tensor, size: tuple[int, int] = BLOCK) -> Tensor:
    bands = [[block.abs().amax() for block in band.split(size[1], 1)] for band in weight.split(size[0])]
    return torch.stack([torch.stack(band) for band in bands]) / 448


def _spread_blocks(scale: Tensor, shape: tuple[int, int], size: tuple[int, int] = BLOCK) -> Tensor:
    return scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[: shape[0], : shape[1]]


def blocks_style(size: tuple[int, int]) -> Style:
    """quant_method "fp8" with blocks of this size."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(size)}
    return Style(config, "_scale_inv", partial(_of_blocks, size=size), partial(_spread_blocks, size=size))


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


STYLES: dict[str, Style] = {
    "fp8 tensor": Style(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "_scale",
        _of_tensor,
        lambda scale, shape: scale,
    ),
    "fp8 blocks": blocks_style(BLOCK),
    "compressed tensor": Style(
        _compressed("tensor"), "_scale", lambda w: _of_tensor(w).bfloat16().reshape(1), lambda scale, shape: scale
    ),
    "compressed channel": Style(
        _compressed("channel"), "_scale", lambda w: w.abs().amax(1, keepdim=True) / 448, lambda scale, shape: scale
    ),
    "compressed blocks": Style(_compressed("block", block_structure=list(BLOCK)), "_scale", _of_blocks, _spread_blocks),
}


def quantise(
    folder: Path, style: Style, target: Path, kv_scales: tuple[float, float] | None = None
) -> tuple[Path, Path]:
    """Make from the model in `folder` a checkpoint with FP8 weights, and a plain one with the same weights.

    `kv_scales`: (K, V) for every layer's cache, as a calibrated checkpoint has them. Returns both folders, in `target`.
    """
    fp8, plain = target / "fp8", target / "plain"
    for copy in (fp8, plain):
        shutil.copytree(folder, copy)
    raw = json.loads((folder / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**raw, "quantization_config": style.config}))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        stored, dequantized = dict(tensors), dict(tensors)
        for name, original in tensors.items():
            if name.split(".")[-2] not in LINEAR or not name.endswith("weight"):
                continue
            weight = original.float()
            scale = style.stored_scale(weight)
            each = style.spread(scale.float(), (weight.size(0), weight.size(1)))
            values = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[name] = values
            stored[name + style.suffix] = scale
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
            dequantized[name] = values.float() * each
        if kv_scales is not None:
            layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
            for layer in layers:
                for side, value in zip("kv", kv_scales, strict=True):
                    stored[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor([value])
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, fp8 / file.name)
        save_file({name: tensor.contiguous() for name, tensor in dequantized.items()}, plain / file.name)
    # The index of a sharded checkpoint names the scales' files as well.
    for index in fp8.glob("*.index.json"):
        weight_map = {name: file.name for file in fp8.glob("*.safetensors") for name in load_file(file)}
        index.write_text(json.dumps({"weight_map": weight_map}))
    return fp8, plain
