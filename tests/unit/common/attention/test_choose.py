"""Which attention and which kernels a device gets, and what is said about it; flat lists of pages."""

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

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.choose import choose_attention, worth_recording
from common.attention.cpu import CpuAttention
from common.attention.flashinfer import FlashInferAttention, split_bytes, unrecorded_split_bytes, why_not
from common.attention.pages import page_lists
from common.attention.sdpa import SdpaAttention
from common.kernels import library
from common.kernels.choose import choose_kernels
from common.kernels.flashinfer_kernels import FlashInferKernels
from common.kernels.library import find_flashinfer
from common.kernels.torch_kernels import TORCH
from common.kv.layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

CARD = torch.device("cuda", 0)
LAYOUT = KVLayout("f", KVSpec.uniform(1, 2, 64, "bfloat16"))


def shape(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, max_context: int = 0) -> AttentionShape:
    return AttentionShape(4, 2, head_dim, dtype, 16, max_context)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As if there were a card; what would run on it does not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "_run_one", lambda flashinfer, device: None)
    find_flashinfer.cache_clear()
    yield monkeypatch
    find_flashinfer.cache_clear()


def test_without_flashinfer_a_card_computes_with_pytorch_which_is_said_once(
    card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card.setitem(sys.modules, "flashinfer", None)
    for _ in range(3):
        assert choose_kernels(CARD, torch.bfloat16) is TORCH
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "flashinfer cannot be imported" in caplog.text


def test_kernels_that_cannot_be_built_are_done_without(
    card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(flashinfer: object, device: object) -> None:
        raise RuntimeError("Could not find nvcc")

    card.setitem(sys.modules, "flashinfer", fake_flashinfer)
    card.setattr(library, "_run_one", no_compiler)
    assert choose_kernels(CARD, torch.bfloat16) is TORCH
    assert "Could not find nvcc" in caplog.text


def test_compiler_tools_of_a_virtual_environment_that_is_not_activated_are_found(
    card: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """flashinfer runs `ninja` from PATH; without it every kernel that was not compiled ahead would be done without."""
    installed, programs = tmp_path / "lib" / "ninja-1.13.dist-info", tmp_path / "bin"
    for folder in (installed, programs, tmp_path / "empty"):
        folder.mkdir(parents=True)
    (programs / "ninja").touch(0o755)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ninja\nVersion: 1.13\n")
    (installed / "RECORD").write_text("ninja-1.13.dist-info/METADATA,,\n../bin/ninja,,\n")
    card.syspath_prepend(tmp_path / "lib")
    card.setenv("PATH", str(tmp_path / "empty"))
    card.setitem(sys.modules, "flashinfer", fake_flashinfer)
    choose_kernels(CARD, torch.float16)
    assert shutil.which("ninja") == str(programs / "ninja")


def test_with_flashinfer_16_bits_compute_with_its_kernels(card: pytest.MonkeyPatch) -> None:
    card.setitem(sys.modules, "flashinfer", fake_flashinfer)
    assert isinstance(choose_kernels(CARD, torch.float16), FlashInferKernels)
    assert choose_kernels(CARD, torch.float32) is TORCH


def test_a_model_without_kernels_attends_to_gathered_pages_which_is_said_once(
    card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card.setitem(sys.modules, "flashinfer", fake_flashinfer)
    on_gpu: Any = SimpleNamespace(
        device=CARD, dtype=torch.bfloat16, stacked=torch.empty(0), scales=(), block_size=16, num_blocks=16
    )
    for _ in range(2):
        assert isinstance(choose_attention(on_gpu, shape(head_dim=96)), SdpaAttention)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "attention uses PyTorch on gathered KV blocks, which is slower: "
        "flashinfer has kernels for heads of (64, 128, 256), the model's have 96"
    ]


def test_cards_older_than_bfloat16_do_without(card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    card.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert find_flashinfer(CARD).flashinfer is None
    assert "7.5" in caplog.text


def test_models_that_flashinfer_has_no_kernels_for() -> None:
    assert not why_not(shape(), torch.bfloat16)
    assert not why_not(shape(), torch.float8_e4m3fn)
    assert not why_not(shape(torch.float16, 128), torch.float16)
    assert "16 bits" in why_not(shape(torch.float32), torch.float32)
    assert "heads" in why_not(shape(head_dim=80), torch.bfloat16)
    assert "cache" in why_not(shape(), torch.float32)


def test_a_cpu_gets_its_own_attention_and_gathered_pages_are_recorded_for_short_contexts_only() -> None:
    storage = KVStorage(LAYOUT, LAYOUT.shard(0, 0), 4)
    assert isinstance(choose_attention(storage.groups[0], shape()), CpuAttention)
    gathered = SdpaAttention(storage.groups[0], shape())
    assert not worth_recording(gathered, 100_000)
    assert worth_recording(gathered, 2048)
    assert worth_recording(FlashInferAttention(storage.groups[0], shape(), fake_flashinfer), 100_000)  # pyright: ignore[reportArgumentType]


def test_page_lists_have_the_pages_of_the_contexts_and_no_more() -> None:
    pages = page_lists([1, 16, 17], [[7, 8], [3], [5, 4, 9]], 16, pinned=False)
    assert pages.indptr.tolist() == [0, 1, 2, 4]
    assert pages.indices.tolist() == [7, 3, 5, 4]
    assert pages.last_page_len.tolist() == [1, 16, 1]
    assert {tensor.dtype for tensor in (pages.indptr, pages.indices, pages.last_page_len)} == {torch.int32}


def test_a_context_beyond_the_longest_is_refused_rather_than_written_elsewhere() -> None:
    storage = KVStorage(LAYOUT, LAYOUT.shard(0, 0), 8)
    graph = FlashInferAttention(storage.groups[0], shape(max_context=32), fake_flashinfer).for_graph(1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="more than the 2 of the longest"):
        graph.plan(AttentionMetadata([1], [33], [[0, 1, 2]], torch.tensor([32])))


def test_partial_results_of_long_prompts_get_the_memory_that_flashinfer_plans() -> None:
    """128 query heads over 8 KV heads on an H200's 132 processors: 33 tiles of 128 rows for each KV head."""
    wide = AttentionShape(128, 8, 128, torch.bfloat16, 16)
    planned = 128 * 33 * 128 * 129 * 4
    assert 256 * 2**20 < planned <= unrecorded_split_bytes(wide, 132)
    # On eight ranks it is the same for each.
    one_of_eight = AttentionShape(16, 1, 128, torch.bfloat16, 16)
    assert unrecorded_split_bytes(one_of_eight, 132) >= 16 * 264 * 128 * 129 * 4


def test_partial_results_of_large_recorded_steps_get_the_memory_that_flashinfer_plans() -> None:
    """64 query heads of 128 over 8 KV heads, 512 rows: 767 tiles of 16 rows, their values and sums in float32."""
    large = AttentionShape(64, 8, 128, torch.bfloat16, 16)
    assert split_bytes(large, 512) >= 64 * (512 * 8 // 16 + 511) * 16 * 129 * 4
