"""An encoder of the BERT family on a CPU: hidden states of a batch of texts, without padding.

All products run over the tokens of all texts together; only attention goes text by text, of equal lengths together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor

from common.base.device import CPU
from common.control.pooling import PoolInput
from common.kernels.choose import choose_kernels
from common.model.formats.base import Linear
from common.model.formats.floating import float_linear
from common.model.pooling.encoder_config import EncoderConfig
from common.model.pooling.pooler import same_length, starts
from common.model.precision import FLOAT32
from common.model.weights import CheckpointWeights

_ACTIVATIONS = {"relu": fn.relu, "gelu": fn.gelu, "gelu_tanh": partial(fn.gelu, approximate="tanh")}


class _Norm(NamedTuple):
    """weight, bias: [hidden]."""

    weight: Tensor
    bias: Tensor


class _Layer(NamedTuple):
    qkv: Linear
    attention_out: Linear
    attention_norm: _Norm
    up: Linear
    down: Linear
    norm: _Norm


class Encoder:
    """`PoolingModel` of one encoder; float32.

    Raises: ConfigError for missing or wrong weights.
    """

    def __init__(self, path: Path, config: EncoderConfig) -> None:
        self.config = config
        weights = CheckpointWeights(path, other_beginnings=((config.weight_prefix, ""),))
        kernels = choose_kernels(CPU, torch.float32)
        hidden, wide, prefix = config.hidden_size, config.intermediate_size, config.weight_prefix

        def read(name: str, *shape: int) -> Tensor:
            return weights.read(name, shape, torch.float32)

        def linear(names: Sequence[str], out: int, width: int = hidden) -> Linear:
            """Several layers of equal shapes merged to one, whose outputs follow each other."""
            weight = torch.cat([read(f"{name}.weight", out, width) for name in names])
            return float_linear(weight, torch.cat([read(f"{name}.bias", out) for name in names]), FLOAT32, kernels)

        def norm(name: str) -> _Norm:
            """Checkpoints converted from TensorFlow call the weight `gamma` and the bias `beta`; transformers reads them, too."""
            weight, bias = ("gamma", "beta") if f"{name}.gamma" in weights else ("weight", "bias")
            return _Norm(read(f"{name}.{weight}", hidden), read(f"{name}.{bias}", hidden))

        def layer(index: int) -> _Layer:
            at = f"{prefix}encoder.layer.{index}"
            return _Layer(
                linear([f"{at}.attention.self.{name}" for name in ("query", "key", "value")], hidden),
                linear([f"{at}.attention.output.dense"], hidden),
                norm(f"{at}.attention.output.LayerNorm"),
                linear([f"{at}.intermediate.dense"], wide),
                linear([f"{at}.output.dense"], hidden, wide),
                norm(f"{at}.output.LayerNorm"),
            )

        at = f"{prefix}embeddings"
        self._words = read(f"{at}.word_embeddings.weight", config.vocab_size, hidden)
        self._positions = read(f"{at}.position_embeddings.weight", config.num_positions, hidden)
        self._types = read(f"{at}.token_type_embeddings.weight", config.num_types, hidden)
        self._norm = norm(f"{at}.LayerNorm")
        self._layers = [layer(index) for index in range(config.num_layers)]
        self._head: tuple[Linear, Linear] | None = None
        if config.task == "score":
            dense = "classifier.dense" if config.is_roberta else f"{prefix}pooler.dense"
            last = "classifier.out_proj" if config.is_roberta else "classifier"
            self._head = linear([dense], hidden), linear([last], 1)

    @torch.inference_mode()
    def hidden(self, inputs: Sequence[PoolInput]) -> tuple[Tensor, list[int]]:
        config = self.config
        lengths = [len(each.token_ids) for each in inputs]
        ids = torch.tensor([token for each in inputs for token in each.token_ids])
        x = self._words[ids] + self._positions[_positions(ids, lengths, config.padding_id)]
        types = torch.zeros(len(ids), dtype=torch.long)
        if config.num_types > 1:
            begin = 0
            for each, length in zip(inputs, lengths, strict=True):
                if each.second_at:
                    types[begin + each.second_at : begin + length] = 1
                begin += length
        x = self._normed(x + self._types[types], self._norm)
        groups = same_length(lengths)
        for layer in self._layers:
            x = self._normed(
                x + layer.attention_out.forward(self._attend(layer.qkv.forward(x), groups)), layer.attention_norm
            )
            inner = _ACTIVATIONS[config.activation](layer.up.forward(x))
            x = self._normed(x + layer.down.forward(inner), layer.norm)
        return x, lengths

    @torch.inference_mode()
    def scores(self, hidden: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        assert self._head is not None
        dense, last = self._head
        scores = last.forward(torch.tanh(dense.forward(hidden[starts(lengths)])))[:, 0]
        return scores, scores if self.config.score_activation == "identity" else torch.sigmoid(scores)

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        return fn.layer_norm(x, (x.size(-1),), norm.weight, norm.bias, self.config.norm_eps)

    def _attend(self, qkv: Tensor, groups: Sequence[tuple[Tensor, int]]) -> Tensor:
        """qkv: [tokens, 3 * hidden]. Returns [tokens, hidden]."""
        heads, hidden = self.config.num_heads, self.config.hidden_size
        out = torch.empty(qkv.size(0), hidden)
        for rows, length in groups:
            parts = qkv[rows].view(-1, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            mixed = fn.scaled_dot_product_attention(parts[0], parts[1], parts[2])
            out[rows] = mixed.transpose(1, 2).reshape(-1, hidden)
        return out


def _positions(ids: Tensor, lengths: Sequence[int], padding_id: int | None) -> Tensor:
    """The position of each token in its text."""
    if padding_id is None:
        return torch.cat([torch.arange(length) for length in lengths])
    counted = [part.cumsum(0) for part in (ids != padding_id).split(list(lengths))]
    return torch.where(ids == padding_id, 0, torch.cat(counted)) + padding_id
