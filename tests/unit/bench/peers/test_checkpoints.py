"""The comparison's weights: which tensors a shape has, and their names and order in GGUF."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from bench.peers.checkpoints import make_checkpoint, tensor_shapes
from bench.peers.to_gguf import gguf_name, interleave_halves, read_header
from bench.shape import SHAPES, Shape

SMALL = Shape("small", hidden=64, layers=2, q_heads=2, kv_heads=1, intermediate=96, vocab=400, head_dim=32)


@pytest.mark.parametrize("name", ["33m", "0.5b", "4b-moe"])
def test_the_matrices_of_a_checkpoint_are_those_that_a_token_reads(name: str) -> None:
    shape = SHAPES[name]
    matrices = {tensor: size for tensor, size in tensor_shapes(shape).items() if len(size) == 2}
    if shape.is_llama:
        del matrices["model.embed_tokens.weight"]  # only one row of it is read
    experts = {tensor: matrices.pop(tensor) for tensor in list(matrices) if ".experts." in tensor}
    used = sum(math.prod(size) for size in experts.values()) * shape.top_k // max(shape.experts, 1)
    assert 2 * (used + sum(math.prod(size) for size in matrices.values())) == shape.weight_bytes_per_token()


def test_a_step_of_many_sequences_reads_nearly_all_experts() -> None:
    shape = SHAPES["4b-moe"]
    expert = 2 * shape.layers * 3 * shape.hidden * shape.intermediate
    one, many = shape.weight_bytes_per_step(1), shape.weight_bytes_per_step(1000)
    assert one == shape.weight_bytes_per_token()
    assert many - one == pytest.approx(expert * (shape.experts - shape.top_k), rel=1e-3)


def test_the_small_shape_has_the_67_mb_that_it_is_known_by() -> None:
    elements = sum(math.prod(size) for size in tensor_shapes(SHAPES["33m"]).values())
    assert round(2 * elements / 1e6) == 67


def test_every_tensor_has_its_own_name_in_gguf() -> None:
    names = [gguf_name(tensor) for shape in ("33m", "0.5b") for tensor in [*tensor_shapes(SHAPES[shape])][-20:]]
    assert gguf_name("model.layers.11.self_attn.q_proj.bias") == "blk.11.attn_q.bias"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert {"output.weight", "output_norm.weight", "blk.23.ffn_down.weight"} <= set(names)
    whole = [gguf_name(tensor) for tensor in tensor_shapes(SHAPES["0.5b"])]
    assert len(set(whole)) == len(whole)


def test_experts_of_a_layer_are_one_tensor_in_gguf() -> None:
    assert gguf_name("model.layers.3.mlp.experts.17.down_proj.weight") == "blk.3.ffn_down_exps.weight"
    assert {gguf_name(tensor) for tensor in tensor_shapes(SHAPES["4b-moe"])} >= {"blk.0.ffn_gate_inp.weight"}


def test_a_tensor_that_no_family_has_is_refused() -> None:
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.self_attn.rotary.weight")


def test_rotary_halves_of_each_head_are_interleaved() -> None:
    rows = np.arange(8).reshape(8, 1)  # two heads of four
    assert interleave_halves(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_checkpoint_is_made_once_and_its_header_tells_every_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint(SMALL, tmp_path)
    weights = folder / "model.safetensors"
    tensors, data_at = read_header(weights)
    assert {name: tuple(tensor["shape"]) for name, tensor in tensors.items()} == tensor_shapes(SMALL)
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert data_at + max(tensor["data_offsets"][1] for tensor in tensors.values()) == weights.stat().st_size
    made = weights.stat().st_mtime_ns
    assert make_checkpoint(SMALL, tmp_path) == folder
    assert weights.stat().st_mtime_ns == made
