"""A weight format is an entry in `METHODS` and in `FORMATS`: a toy one is read, cut over ranks and multiplied as floats are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fp8_checkpoints import LINEAR
from support.oracle import TINY, make_tiny
from support.runner_cases import check, drive, make_runner, prompt
from torch import Tensor

from common.base.errors import ConfigError
from common.model.build import Build
from common.model.config import load_model_config
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.floating import FloatLinear
from common.model.formats.quantization import METHODS, Quantization
from common.model.formats.registry import FORMATS
from common.model.precision import Precision
from common.model.tensor_files import TensorFiles
from common.model.weights import CheckpointWeights
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace

# int16 numbers, times one scale for each row.


@dataclass(frozen=True)
class Int16Quantization(Quantization):
    multiplies: bool


class Int16Format:
    def __init__(self, tensors: TensorFiles, device: torch.device, quantization: Int16Quantization) -> None:
        self._tensors = tensors
        self._multiplies = quantization.multiplies

    def holds(self, name: str) -> bool:
        return self._tensors.dtype(name) == "I16"

    def parts(self, stored: StoredTensor) -> tuple[Tensor, Tensor]:
        """This rank's values, and the scales of its rows."""
        part = stored.part
        scale = self._tensors.read(f"{stored.name}_scale", (stored.shape[0], 1))
        own = scale[part.lo : part.hi] if part is not None and part.dim == 0 else scale
        return self._tensors.read(stored.name, stored.shape, part), own

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        values, scale = self.parts(stored)
        return (values * scale).to(dtype)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Int16Linear | None:
        return Int16Linear([self.parts(stored) for stored in stacked], bias) if self._multiplies else None


class Int16Linear:
    def __init__(self, parts: list[tuple[Tensor, Tensor]], bias: Tensor | None) -> None:
        self._values = torch.cat([values for values, _ in parts])
        self._scale = torch.cat([scale for _, scale in parts])
        self._bias = 0.0 if bias is None else bias

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return (x @ self._values.to(x.dtype).t() * self._scale[:, 0] + self._bias).to(dtype or x.dtype)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint of int16 weights, its method registered, and the float checkpoint of the same weights."""
    monkeypatch.setitem(FORMATS, Int16Quantization, Int16Format)
    monkeypatch.setitem(METHODS, "int16", lambda raw: Int16Quantization(raw["multiplies"]))
    plain = make_tiny("llama-biases", tmp_path / "plain")
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    tensors = load_file(plain / "model.safetensors")
    stored, same = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.split(".")[-2] in LINEAR and name.endswith("weight"):
            scale = weight.abs().amax(1, keepdim=True) / 32767
            stored[name], stored[f"{name}_scale"] = (weight / scale).round().short(), scale
            same[name] = stored[name] * scale
    save_file(stored, packed / "model.safetensors")
    save_file(same, plain / "model.safetensors")
    set_quantization(packed, multiplies=False)
    return packed, plain


def set_quantization(folder: Path, *, multiplies: bool) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "int16", "multiplies": multiplies}
    (folder / "config.json").write_text(json.dumps(raw))


def build_of(folder: Path, tp_rank: int = 0, tp_size: int = 1) -> Build:
    config, mesh = load_model_config(folder), Mesh(RankPlace(tp_rank, tp_size))
    return Build(
        config, CheckpointWeights(folder, config.quantization), Precision.choose("float32", small_batches=True), mesh
    )


@pytest.mark.parametrize("multiplies", [False, True])
def test_a_new_format_generates_what_the_same_float_weights_do(folders: tuple[Path, Path], multiplies: bool) -> None:
    packed, plain = folders
    set_quantization(packed, multiplies=multiplies)
    prompts = [prompt(n, TINY["llama-biases"].vocab_size) for n in (1, 17, 40)]
    check(plain, prompts, drive(make_runner(packed), prompts, 16, 12), 12)


@pytest.mark.parametrize("multiplies", [False, True])
@torch.inference_mode()
def test_two_ranks_shares_of_a_new_format_make_the_whole_layer(folders: tuple[Path, Path], multiplies: bool) -> None:
    packed, plain = folders
    set_quantization(packed, multiplies=multiplies)
    whole = build_of(plain)
    hidden, mlp = whole.config.hidden_size, whole.config.layers[0].mlp
    x, inner_x = torch.randn(3, hidden), torch.randn(3, mlp.inner_size)
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")]
    down = "model.layers.1.mlp.down_proj"
    columns, rows = [], []
    for rank in range(2):
        build = build_of(packed, rank, 2)
        own = build.inner(mlp)
        layer = build.column_linear(names, [own, own], hidden, bias=True)
        assert isinstance(layer, Int16Linear if multiplies else FloatLinear)
        columns.append(layer.forward(x).chunk(2, 1))
        rows.append(build.row_linear(down, own, hidden, bias=True).forward(inner_x[:, own.lo : own.hi].contiguous()))
    share = whole.inner(mlp)
    expected = whole.column_linear(names, [share, share], hidden, bias=True).forward(x)
    joined = torch.cat([torch.cat(each, 1) for each in zip(*columns, strict=True)], 1)
    torch.testing.assert_close(joined, expected, atol=1e-5, rtol=1e-5)
    expected = whole.row_linear(down, share, hidden, bias=True).forward(inner_x)
    torch.testing.assert_close(rows[0] + rows[1], expected, atol=1e-5, rtol=1e-5)


def test_layers_that_are_stored_as_floats_stay_floats_in_a_quantized_checkpoint(folders: tuple[Path, Path]) -> None:
    set_quantization(folders[0], multiplies=True)
    tensors = load_file(folders[0] / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = load_file(folders[1] / "model.safetensors")[name]
    save_file(tensors, folders[0] / "model.safetensors")
    build = build_of(folders[0])
    share, hidden = build.inner(build.config.layers[0].mlp), build.config.hidden_size
    mixed = build.column_linear(
        [f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up")], [share] * 2, hidden, bias=True
    )
    assert isinstance(mixed, FloatLinear)
    assert isinstance(build.row_linear("model.layers.0.mlp.down_proj", share, hidden, bias=True), Int16Linear)


def test_a_format_that_config_json_does_not_name_is_refused(folders: tuple[Path, Path]) -> None:
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 112)
    with pytest.raises(
        ConfigError, match=r"down_proj\.weight is torch\.int16, which no supported weight format stores"
    ):
        CheckpointWeights(folders[0]).read(name, shape, torch.float32)
