"""Checkpoints in int8 and in groups of 4 or 8 bits, in the published formats, each with an equal float32 checkpoint."""

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
from support.fp8_checkpoints import LINEAR
from torch import Tensor

GROUP = 16
"""Published checkpoints have 32, 64 or 128. This size divides the tiny models' matrices."""

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of one linear layer, by the last part of their names, and the weight that they mean, [out, in] float32."""


@dataclass(frozen=True)
class Style:
    """One published format. `store`: (weight [out, in] float32, name of the layer) to `Stored`."""

    config: dict[str, Any]
    store: Callable[[Tensor, str], Stored]
    is_exact: bool = True
    """Whether only weights are rounded."""


def _codes(weight: Tensor, bits: int, group_of: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scale and zero [out, groups], and the weight that they mean. group_of: [in]."""
    top = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(group_of.max()) + 1):
        own = weight[:, group_of == group]
        lo, hi = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if symmetric:
            scales.append((own.abs().amax(1) * 2 / top).half().float())
            zeros.append(torch.full_like(lo, 2 ** (bits - 1)))
        else:
            scales.append(((hi - lo) / top).half().float())
            zeros.append((-lo / scales[-1]).round().clamp(0, top))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    each_scale, each_zero = scale[:, group_of], zero[:, group_of]
    codes = (weight / each_scale + each_zero).round().clamp(0, top)
    return codes.to(torch.int64), scale, zero.to(torch.int64), each_scale * (codes - each_zero)


def _pack(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, n] into words along the rows: the i-th place of a word holds its `order[i]`-th number."""
    per_word = 32 // bits
    split = numbers.view(numbers.size(0), -1, per_word)
    words = torch.zeros(split.shape[:2], dtype=torch.int64)
    for place, source in enumerate(order or range(per_word)):
        words |= split[:, :, source] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _in_order(weight: Tensor, group: int = GROUP) -> Tensor:
    return torch.arange(weight.size(1)) // group


def _awq(weight: Tensor, name: str) -> Stored:
    codes, scale, zero, means = _codes(weight, 4, _in_order(weight), symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _pack(codes.t(), 4, order), "qzeros": _pack(zero.t(), 4, order), "scales": scale.t().half()}
    return tensors, means


def _gptq(
    weight: Tensor, name: str, *, bits: int = 4, symmetric: bool = False, offset: int = 1, order: str = "none"
) -> Stored:
    """`order`: "none", or "inputs" where layers of the same inputs have the same order, or "layer" where all differ."""
    group_of = _in_order(weight)
    if order != "none":
        seed = weight.size(1) if order == "inputs" else sum(name.encode())
        group_of = group_of[torch.randperm(weight.size(1), generator=torch.Generator().manual_seed(seed))]
    codes, scale, zero, means = _codes(weight, bits, group_of, symmetric=symmetric)
    tensors = {
        "qweight": _pack(codes, bits).t(),
        "qzeros": _pack(zero.t(), bits) - sum(offset << bits * place for place in range(32 // bits)),
        "scales": scale.t().half(),
        "g_idx": group_of.to(torch.int32),
    }
    return tensors, means


def _packed(weight: Tensor, name: str, *, bits: int = 4, symmetric: bool = True, group: int | None = GROUP) -> Stored:
    codes, scale, zero, means = _codes(weight, bits, _in_order(weight, group or weight.size(1)), symmetric=symmetric)
    tensors = {
        "weight_packed": _pack(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _pack(zero.t().contiguous(), bits).t()
    return tensors, means


def _int8(weight: Tensor, name: str, *, of_tensor: bool = False) -> Stored:
    scale = (weight.abs().amax() if of_tensor else weight.abs().amax(1, keepdim=True)) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale.reshape(1) if of_tensor else scale}, codes * scale


def _gptq_config(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False, **more}


def _compressed(layout: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if layout == "int-quantized" else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


STYLES: dict[str, Style] = {
    "awq": Style(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        },
        _awq,
    ),
    "gptq": Style(_gptq_config(), _gptq),
    "gptq symmetric": Style(_gptq_config(sym=True), partial(_gptq, symmetric=True)),
    "gptq v2": Style(_gptq_config(checkpoint_format="gptq_v2"), partial(_gptq, offset=0)),
    "gptq desc_act": Style(_gptq_config(desc_act=True), partial(_gptq, order="inputs")),
    "gptq desc_act of each layer": Style(_gptq_config(desc_act=True), partial(_gptq, order="layer")),
    "gptq 8 bit": Style(_gptq_config(8), partial(_gptq, bits=8)),
    "packed groups": Style(_compressed("pack-quantized", 4, "group", group_size=GROUP), _packed),
    "packed asymmetric": Style(
        _compressed("pack-quantized", 4, "group", group_size=GROUP, symmetric=False), partial(_packed, symmetric=False)
    ),
    "packed channels": Style(_compressed("pack-quantized", 4, "channel"), partial(_packed, group=None)),
    "packed 8 bit": Style(_compressed("pack-quantized", 8, "channel"), partial(_packed, bits=8, group=None)),
    "int8 channel": Style(_compressed("int-quantized", 8, "channel"), _int8, is_exact=False),
    "int8 tensor": Style(_compressed("int-quantized", 8, "tensor"), partial(_int8, of_tensor=True), is_exact=False),
}


def quantize(folder: Path, style: Style, target: Path) -> tuple[Path, Path]:
    """Make from the model in `folder` a checkpoint in this style, and a plain one with the same weights.

    Returns both folders, in `target`.
    """
    quantized, plain = target / "quantized", target / "plain"
    for copy in (quantized, plain):
        shutil.copytree(folder, copy)
    raw = json.loads((folder / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**raw, "quantization_config": style.config}))
    for file in folder.glob("*.safetensors"):
        stored, means = {}, {}
        for name, tensor in load_file(file).items():
            layer = name.removesuffix(".weight")
            if layer.split(".")[-1] in LINEAR and name.endswith(".weight"):
                tensors, means[name] = style.store(tensor.float(), layer)
                stored.update({f"{layer}.{last}": each for last, each in tensors.items()})
            else:
                stored[name] = means[name] = tensor
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, quantized / file.name)
        save_file({name: tensor.contiguous() for name, tensor in means.items()}, plain / file.name)
    for index in quantized.glob("*.index.json"):
        weight_map = {name: file.name for file in quantized.glob("*.safetensors") for name in load_file(file)}
        index.write_text(json.dumps({"weight_map": weight_map}))
    return quantized, plain
