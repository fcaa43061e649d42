"""Headers of GGUF files, whole and broken."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from support.gguf_files import Kind, write_gguf
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint
from common.model.gguf.file import open_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_tiny("llama3", root / "original"), root, lambda name, weight: Kind.Q8_0)[0]


def test_metadata_and_tensors_are_those_that_the_package_reads(model: Path) -> None:
    file, reader = open_gguf(model), GGUFReader(model)
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        t.name: (t.lo, t.hi - t.lo) for t in file.tensors.values()
    }
    assert all(list(reversed(file.tensors[t.name].shape)) == t.shape.tolist() for t in reader.tensors)
    for key, value in file.metadata.items():
        field = reader.get_field(key)
        assert field is not None
        assert field.contents() == value


def test_a_file_cut_anywhere_is_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    data, broken = model.read_bytes(), tmp_path / "broken.gguf"
    end = len(open_gguf(model).header.raw)
    for length in [*range(0, end, 61), *range(end, len(data), 4999), len(data) - 1]:
        broken.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"broken\.gguf is not a GGUF file, or is truncated") as caught:
            open_gguf(broken)
        assert "\n" not in caught.value.message


def test_changed_header_bytes_raise_nothing_but_config_errors(model: Path, tmp_path: Path) -> None:
    data, broken = model.read_bytes(), tmp_path / "broken.gguf"
    refused = 0
    for at in range(0, len(open_gguf(model).header.raw), 7):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        broken.write_bytes(changed)
        with contextlib.suppress(ConfigError):
            load_model_config(broken)
            refused -= 1
        refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("architecture", "says"),
    [("falcon", "architecture 'falcon' is not supported"), ("llama", r"holds no tensor token_embd\.weight")],
)
def test_another_architecture_or_an_empty_file_is_refused(tmp_path: Path, architecture: str, says: str) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=says):
        load_model_config(tmp_path / "m.gguf")


def test_the_fingerprint_sees_a_changed_weight_and_the_tokenizer(model: Path, tmp_path: Path) -> None:
    def identity(file: Path) -> str:
        return fingerprint(file, load_model_config(file), "auto", "float32", 0)

    copy = tmp_path / "renamed.gguf"
    data = bytearray(model.read_bytes())
    copy.write_bytes(data)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((model.parent / "tokenizer.json").read_bytes())
    assert identity(copy) == identity(model)
    data[open_gguf(model).tensors["blk.1.ffn_up.weight"].lo] ^= 1
    copy.write_bytes(data)
    changed = identity(copy)
    tokenizer.write_text("{}")
    assert len({identity(model), changed, identity(copy)}) == 3
