"""MXFP4 checkpoints as gpt-oss is published, made from tiny models; each with an equal float32 checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _round(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[experts, in, out] to blocks and scales, and the weight that they mean, [experts, in, out]."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().to(torch.int32)
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)
    codes = (groups / scale[..., None]).unsqueeze(-1).sub(VALUES).abs().argmin(-1).to(torch.uint8)
    means = (VALUES[codes.int()] * scale[..., None]).flatten(-2).transpose(1, 2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8), means.contiguous()


def pack_experts(plain: Path, packed: Path) -> Path:
    """Make `packed` of the gpt-oss model in `plain`, whose experts become what the codes mean. Returns `packed`."""
    shutil.copytree(plain, packed)
    raw = json.loads((plain / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name + "_blocks"], stored[name + "_scales"], tensors[name] = _round(stored.pop(name))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    return packed
