"""Adapters in whole native layers give what they give in layers that run part by part, in every variant of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.lora_files import load_adapters, write_adapter
from support.native_variants import VARIANTS
from support.oracle import make_tiny
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.attention.choose import choose_attention
from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.attention.native import NativeAttention
from common.base.variables import CPU_KERNELS
from common.engine.device_inputs import attention_metadata, rows_of
from common.engine.step import StepInput
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.model.rank_model import HIDDEN

LENGTHS = [1, 5, 3, 1, 17, 4]
ADAPTERS = [1, 0, 2, 2, 1, 3]
MakeAttention = Callable[[KVStorage, Sequence[AttentionShape]], AttentionBackend]


def part_by_part(storage: KVStorage, shapes: Sequence[AttentionShape]) -> AttentionBackend:
    return attention_of_groups(storage, shapes, CpuAttention)


def hidden(model: DecoderModel, dtype: str, make: MakeAttention, adapters: list[int]) -> Tensor:
    """The final hidden states of prompts of `LENGTHS`, each with its adapter."""
    layout = KVLayout("f", kv_spec(model.config, dtype))
    storage = KVStorage(layout, layout.shard(0, 0), 2 * len(LENGTHS))
    attention = make(storage, model.attention_shapes(16))
    tables = [[2 * index, 2 * index + 1] for index in range(len(LENGTHS))]
    places = [(table, at) for table, length in zip(tables, LENGTHS, strict=True) for at in range(length)]
    slots = [table[at // 16] * 16 + at % 16 for table, at in places]
    tokens = [3 + 7 * index % 290 for index in range(len(places))]
    step = StepInput(1, tokens, [at for _, at in places], [slots], LENGTHS, LENGTHS, [tables])
    rows = rows_of(step, torch.device("cpu"))
    attention.plan(attention_metadata(step, rows.slots))
    model.adapters.plan(adapters, LENGTHS)
    assert isinstance(attention, NativeAttention) is (make is choose_attention)
    return model.forward(rows.token_ids, rows.positions, attention)[HIDDEN].float()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize(
    "variant", [VARIANTS[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in VARIANTS[1:])]
)
def test_whole_layers_add_the_adapters_of_each_row(
    variant: str, dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_KERNELS, variant)
    path = make_tiny("qwen2", tmp_path / "model")
    model = load_model(path, load_model_config(path), dtype=dtype, load_format="auto", seed=0, small_batches=True)
    assert isinstance(model, DecoderModel)
    all_but_some = {2: ("q_proj", "down_proj"), 3: ("gate_proj", "o_proj")}
    load_adapters(
        model,
        [
            write_adapter(tmp_path / f"a{rank}", path, rank=4 * rank + 1, seed=rank, targets=all_but_some.get(rank, ()))
            for rank in (1, 2, 3)
        ],
    )
    whole, parts = (hidden(model, dtype, make, ADAPTERS) for make in (choose_attention, part_by_part))
    assert (whole - parts).abs().max() < tolerance * parts.abs().max()
    plain = hidden(model, dtype, choose_attention, [])
    changed = [(whole[at] - plain[at]).abs().max() > 10 * tolerance / 4 for at in (0, 6, 8, 10)]
    assert all(changed)
    assert torch.equal(whole[1:6], plain[1:6])  # the rows without an adapter
