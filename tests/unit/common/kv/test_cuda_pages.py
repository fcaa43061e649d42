"""Where the CUDA library is missing, and KV in memory that it allocates. tests/gpu tests what it does on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fake_nvcc import make_empty_home, put_nvcc
from torch import Tensor

from common.kv import cuda_pages, storage
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = make_empty_home(tmp_path, monkeypatch)
    cuda_pages.cuda_library.cache_clear()
    yield home
    cuda_pages.cuda_library.cache_clear()


def test_without_a_compiler_the_reason_is_logged_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        assert cuda_pages.cuda_library() is None
    assert cuda_pages.allocate_shareable(torch.device("cuda", 0), 10) is None
    [record] = caplog.records
    assert "no nvcc" in record.getMessage()


def test_the_compilers_message_is_logged(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_nvcc(home, "echo this GPU is from 1999 >&2; exit 1")
    assert cuda_pages.cuda_library() is None
    assert "this GPU is from 1999" in caplog.text
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_a_user_without_a_home_directory_gets_no_library(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is so in a container whose user is only a number."""

    def nowhere(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    assert cuda_pages.cuda_library() is None
    assert "home directory" in caplog.text


class StubGpuMemory:
    """Stands in for `GpuMemory`, in CPU memory."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.bytes = torch.full((size_bytes,), 7, dtype=torch.uint8)

    def tensor(self, device: torch.device) -> Tensor:
        return self.bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_kv_on_a_gpu_lies_in_memory_that_can_be_shared(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "allocate_shareable", StubGpuMemory)
    kv = KVLayout("m", KVSpec.uniform(3, 4, 8, dtype, block_size=16))
    made = KVStorage(kv, kv.shard(0, 0), 5, device="cuda:0")
    assert made.host_bytes is None
    assert isinstance(made.shared, StubGpuMemory)
    assert made.shared.size_bytes == 5 * kv.spec.bytes_per_block
    assert made.groups[0].stacked.shape == (3, 2, 5, 4, 16, 8)
    assert made.data.data_ptr() == made.shared.bytes.data_ptr()
    assert not made.shared.bytes.any(), "it begins empty"
