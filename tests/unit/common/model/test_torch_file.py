"""Checkpoints that `torch.save` wrote load as their safetensors do; others of that name are refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint
from common.model.tensor_files import Part, TensorFiles


def convert(folder: Path, num_files: int = 1) -> dict[str, torch.Tensor]:
    """Replace the folder's safetensors by `pytorch_model*.bin`; returns its tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    files = {f"pytorch_model-{i}-of-{num_files}.bin": names[i::num_files] for i in range(num_files)}
    if num_files == 1:
        files = {"pytorch_model.bin": names}
    else:
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, held in files.items():
        torch.save({name: tensors[name] for name in held}, folder / file)
    return tensors


def identity(folder: Path) -> str:
    return fingerprint(folder, load_model_config(folder), "auto", "float32", 0)


@pytest.mark.parametrize("num_files", [1, 3])
def test_tensors_and_parts_of_them_are_those_of_the_safetensors(folder: Path, num_files: int):
    tensors = convert(folder, num_files)
    found = TensorFiles(folder)
    for name, expected in tensors.items():
        assert torch.equal(found.read(name, tuple(expected.shape)), expected)
        assert torch.equal(found.read(name, part=Part(0, 1, 3)), expected[1:3])
    assert found.dtype(next(iter(tensors))) == "F32"
    with pytest.raises(ConfigError, match=r"no weight file holds the tensor nothing"):
        found.read("nothing")


def test_fingerprint_is_of_the_weights(folder: Path):
    tensors = convert(folder)
    first = identity(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert identity(folder) == first
    tensors["model.norm.weight"][0] += 1
    torch.save(tensors, folder / "pytorch_model.bin")
    assert identity(folder) != first


def test_safetensors_go_first(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(b"not even weights")
    assert "model.norm.weight" in TensorFiles(folder)


class Evil:
    def __reduce__(self):
        return (print, ("code of the file ran",))


@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (lambda file, _: file.write_bytes(b"1234"), "torch 1.6"),
        (lambda file, tensors: torch.save(tensors, file, _use_new_zipfile_serialization=False), "convert it"),
        (lambda file, _: torch.save({"a": Evil()}, file), "safely"),
        (lambda file, _: torch.save([1, 2], file), "something else than named tensors"),
        (lambda file, _: file.write_bytes(file.read_bytes()[:-200]), "truncated"),
    ],
)
def test_a_file_that_cannot_be_loaded_safely_is_named(folder: Path, save, reason: str, capsys):
    tensors = convert(folder)
    save(folder / "pytorch_model.bin", tensors)
    with pytest.raises(ConfigError, match=reason) as caught:
        TensorFiles(folder)
    assert "pytorch_model.bin" in caught.value.message
    assert "\n" not in caught.value.message
    assert capsys.readouterr().out == ""
