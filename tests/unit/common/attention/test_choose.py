"""Which attention backend and which kernels a device gets, and what is logged about it."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fake_flashinfer

from common.attention import choose
from common.attention.base import AttentionShape
from common.attention.choose import choose_attention, choose_partial, worth_capturing
from common.attention.cpu import CpuAttention
from common.attention.flashinfer import FlashInferAttention
from common.attention.latent import LatentBackend, LatentShape
from common.attention.native import NativeAttention
from common.attention.sdpa import SdpaAttention
from common.attention.striped import TorchPartialAttention
from common.base.variables import CPU_KERNELS
from common.kernels import library
from common.kernels.choose import choose_kernels
from common.kernels.flashinfer_kernels import FlashInferKernels
from common.kernels.library import find_flashinfer
from common.kernels.native.find import find_native
from common.kernels.torch_kernels import TORCH
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

GPU = torch.device("cuda", 0)
LAYOUT = KVLayout("f", KVSpec.uniform(1, 2, 64, "bfloat16"))


def shape(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, max_context: int = 0) -> AttentionShape:
    return AttentionShape(4, 2, head_dim, dtype, 16, max_context)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Pretend that there is a GPU. The trial run of flashinfer on it is left out."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "_run_one", lambda flashinfer, device: None)
    find_flashinfer.cache_clear()
    yield monkeypatch
    find_flashinfer.cache_clear()


def test_without_flashinfer_a_gpu_computes_with_pytorch_which_is_logged_once(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setitem(sys.modules, "flashinfer", None)
    for _ in range(3):
        assert choose_kernels(GPU, torch.bfloat16) is TORCH
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "flashinfer cannot be imported" in caplog.text
    assert "pip install 'kvrelay[gpu]' brings it" in caplog.text


def test_kernels_that_cannot_be_built_are_replaced_by_pytorch(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(flashinfer: object, device: object) -> None:
        raise RuntimeError("Could not find nvcc")

    gpu.setitem(sys.modules, "flashinfer", fake_flashinfer)
    gpu.setattr(library, "_run_one", no_compiler)
    assert choose_kernels(GPU, torch.bfloat16) is TORCH
    assert "Could not find nvcc" in caplog.text


def test_compiler_tools_of_a_virtual_environment_that_is_not_activated_are_found(
    gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """flashinfer runs `ninja` from PATH; without it no kernel that was not compiled ahead could be used."""
    installed, programs = tmp_path / "lib" / "ninja-1.13.dist-info", tmp_path / "bin"
    for folder in (installed, programs, tmp_path / "empty"):
        folder.mkdir(parents=True)
    (programs / "ninja").touch(0o755)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ninja\nVersion: 1.13\n")
    (installed / "RECORD").write_text("ninja-1.13.dist-info/METADATA,,\n../bin/ninja,,\n")
    gpu.syspath_prepend(tmp_path / "lib")
    gpu.setenv("PATH", str(tmp_path / "empty"))
    gpu.setitem(sys.modules, "flashinfer", fake_flashinfer)
    choose_kernels(GPU, torch.float16)
    assert shutil.which("ninja") == str(programs / "ninja")


def test_with_flashinfer_16_bit_models_compute_with_its_kernels(gpu: pytest.MonkeyPatch) -> None:
    gpu.setitem(sys.modules, "flashinfer", fake_flashinfer)
    assert isinstance(choose_kernels(GPU, torch.float16), FlashInferKernels)
    assert choose_kernels(GPU, torch.float32) is TORCH


def test_a_model_without_kernels_attends_to_gathered_blocks_which_is_logged_once(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setitem(sys.modules, "flashinfer", fake_flashinfer)
    kv: Any = SimpleNamespace(
        device=GPU, dtype=torch.bfloat16, stacked=torch.empty(0), scales=(), block_size=16, num_blocks=16
    )
    on_gpu: Any = SimpleNamespace(layout=LAYOUT, shard=LAYOUT.shard(0, 0), groups=(kv,))
    for _ in range(2):
        assert isinstance(choose_attention(on_gpu, [shape(head_dim=96)]), SdpaAttention)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "attention uses PyTorch on gathered KV blocks, which is slower: "
        "flashinfer has kernels for heads of (64, 128, 256), the model's have 96"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_latents_are_absorbed_by_flashinfer_where_it_reads_them(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    latents = LatentShape(16, 1, 576, torch.bfloat16, 16, latent_dim=512, nope_dim=128, v_head_dim=128)
    kv: Any = SimpleNamespace(device=GPU, dtype=dtype, num_blocks=16, block_size=16, scales=((1.0,),))
    kv.planes, kv.stacked = {"latent": torch.empty(1, 16, 1, 16, 576)}, torch.empty(0)
    gpu.setitem(sys.modules, "flashinfer", fake_flashinfer)
    gpu.setattr(choose, "FlashInferLatent", lambda *args: "flashinfer")
    found = choose.BACKENDS["latent"](kv, latents)
    assert isinstance(found, LatentBackend)
    if dtype == torch.bfloat16:
        assert found.absorbed == "flashinfer"
    else:
        assert isinstance(found.absorbed, SdpaAttention)
        assert "flashinfer reads no latents of torch.float8_e4m3fn for torch.bfloat16 queries" in caplog.text


def test_gpus_older_than_bfloat16_do_not_use_flashinfer(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert find_flashinfer(GPU).flashinfer is None
    assert "7.5" in caplog.text


def test_a_cpu_gets_its_own_attention_and_gathered_blocks_are_captured_for_short_contexts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = KVStorage(LAYOUT, LAYOUT.shard(0, 0), 4)
    native = isinstance(choose_attention(storage, [shape()]), NativeAttention)
    assert native == (find_native() is not None)
    assert (choose_partial(storage.groups[0]) is TorchPartialAttention) != native
    halves = KVLayout("f", KVSpec.uniform(1, 2, 64, "float16"))
    of_halves = KVStorage(halves, halves.shard(0, 0), 4)
    assert isinstance(choose_attention(of_halves, [shape(torch.float16)]), CpuAttention)
    assert choose_partial(of_halves.groups[0]) is TorchPartialAttention
    monkeypatch.setenv(CPU_KERNELS, "torch")
    assert isinstance(choose_attention(storage, [shape()]), CpuAttention)
    assert choose_partial(storage.groups[0]) is TorchPartialAttention
    gathered = SdpaAttention(storage.groups[0], shape())
    assert not worth_capturing(gathered, 100_000)
    assert worth_capturing(gathered, 2048)
    assert worth_capturing(FlashInferAttention(storage.groups[0], shape(), fake_flashinfer), 100_000)  # pyright: ignore[reportArgumentType]
