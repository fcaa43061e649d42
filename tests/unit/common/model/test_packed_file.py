from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.packed_file import PackedTensors, map_packed, write_packed

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int32]


def example() -> PackedTensors:
    weight = torch.randn(300, 70).to(torch.bfloat16)
    return PackedTensors({"weight": weight, "scale": torch.rand(3)}, {"out": 300, "is_paired": True})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), min_size=1, max_size=3)), max_size=4))
def test_what_is_mapped_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, what: list) -> None:
    file = tmp_path_factory.mktemp("packed") / "file"
    tensors = {f"t{i}": torch.randint(0, 100, shape).to(dtype) for i, (dtype, shape) in enumerate(what)}
    write_packed(file, "key", PackedTensors(tensors, {"out": 7}))
    found = map_packed(file, "key")
    assert found is not None
    assert found.numbers == {"out": 7}
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_tensors_begin_at_page_boundaries(tmp_path: Path) -> None:
    write_packed(tmp_path / "file", "key", example())
    found = map_packed(tmp_path / "file", "key")
    assert found is not None
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in found.tensors.values())


def test_a_missing_file_and_one_of_another_key_hold_nothing(tmp_path: Path) -> None:
    assert map_packed(tmp_path / "file", "key") is None
    write_packed(tmp_path / "file", "key", example())
    assert map_packed(tmp_path / "file", "another key") is None


@pytest.mark.parametrize("size", [0, 1, 100, 4096, -1])
def test_a_truncated_file_holds_nothing(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    write_packed(file, "key", example())
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert map_packed(file, "key") is None


def test_a_file_whose_data_became_zeros_holds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_packed(file, "key", example())
    with file.open("r+b") as stream:
        stream.seek(4096)
        stream.write(bytes(4096))
    assert map_packed(file, "key") is None


@pytest.mark.parametrize("header", [b"", b"\n", b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"magic": 1}\n', b"x" * 5000])
def test_a_file_with_a_foreign_header_holds_nothing(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "file").write_bytes(header + bytes(9000))
    assert map_packed(tmp_path / "file", "key") is None


def test_what_is_mapped_survives_the_file(tmp_path: Path) -> None:
    packed = example()
    write_packed(tmp_path / "file", "key", packed)
    found = map_packed(tmp_path / "file", "key")
    assert found is not None
    (tmp_path / "file").unlink()
    assert torch.equal(found.tensors["weight"], packed.tensors["weight"])
