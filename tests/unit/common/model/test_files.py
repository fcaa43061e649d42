"""Files that cannot be loaded are refused in one sentence that names them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.files import files_state, weight_files
from common.model.fingerprint import fingerprint
from common.model.loader import load_model


def load(path: Path) -> DecoderModel:
    return load_model(path, load_model_config(path), dtype="auto", load_format="auto", seed=0, small_batches=True)


def identity(path: Path, load_format: str = "auto", dtype: str = "float32", seed: int = 0) -> str:
    return fingerprint(path, load_model_config(path), load_format, dtype, seed)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10) + b'{"a": {} }',
        struct.pack("<Q", 35) + b'{"a": {"data_offsets": [0, 1e999]}}',
    ],
)
def test_a_file_that_is_not_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    for use in (load, identity):
        with pytest.raises(ConfigError, match=r"model\.safetensors") as caught:
            use(folder)
        assert "\n" not in caught.value.message


def test_a_truncated_file_is_refused_before_anything_is_loaded(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated"):
        load(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00008.safetensors").unlink()
    for use in (load, identity):
        with pytest.raises(ConfigError, match="model-00002-of-00008"):
            use(sharded)


@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_a_single_file_goes_before_an_index_that_was_left_behind(sharded: Path, suffix: str) -> None:
    """As in transformers: weights of the model that was tuned were used, or its missing files ended the start."""
    single = sharded / ("pytorch_model.bin" if suffix else "model.safetensors")
    if suffix:
        for file in sharded.glob("model*"):
            file.rename(sharded / file.name.replace("model", "pytorch_model").replace(".safetensors", ".bin"))
        single.write_bytes(b"")
    else:
        save_file({name: part for file in weight_files(sharded) for name, part in load_file(file).items()}, single)
    assert weight_files(sharded) == [single]


def test_a_single_file_that_lacks_tensors_of_the_index_is_ignored(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of the model, or an adapter, that someone saved under the usual name ended the start."""
    shards = weight_files(sharded)
    save_file({"model.norm.weight": torch.ones(4)}, sharded / "model.safetensors")
    assert weight_files(sharded) == shards
    assert "model.safetensors is ignored: it lacks tensors of model.safetensors.index.json" in caplog.text
    load(sharded)
    shards[0].unlink()
    assert weight_files(sharded) == [sharded / "model.safetensors"], "the index is the one that was left behind"


def test_an_index_cannot_lead_out_of_the_directory(sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"x": torch.ones(1)}, outside)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    with pytest.raises(ConfigError):
        load(sharded)


def test_the_state_of_files_changes_with_their_times_and_not_with_their_folder(folder: Path) -> None:
    before = files_state(folder, "auto")
    moved = folder.rename(folder.with_name("moved"))
    assert files_state(moved, "auto") == before
    assert files_state(moved, "dummy") != before
    file = moved / "model.safetensors"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))  # as after a change that hides its time
    assert files_state(moved, "auto") != before
    file.unlink()
    with pytest.raises(ConfigError, match="holds neither safetensors"):
        files_state(moved, "auto")
