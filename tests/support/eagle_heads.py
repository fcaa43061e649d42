"""EAGLE-3 heads of tiny models, and what they guess, computed slowly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.guessed_answers import slow_draw
from support.oracle import oracle_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

_AUX = [0, 1, 2]
_HEADS, _KV_HEADS, _DIM, _INNER = 4, 2, 16, 96


def make_eagle(target: Path, folder: Path, *, by_hidden: bool = False, seed: int = 7, **changes: Any) -> Path:
    """Write a head for the model in `target` that is right now and then: it knows the model's embedding and LM head.

    by_hidden: the model is one of `support.draft_heads.always_right`, and the head's first guess is always right, made from the hidden
    state alone. `changes`: to its config.json.
    """
    own = load_file(target / "model.safetensors")
    embedding, lm_head = own["model.embed_tokens.weight"], own["lm_head.weight"]
    vocab, hidden = lm_head.shape
    known = torch.arange(0 if by_hidden else vocab // 5, vocab)
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=draw) / shape[-1] ** 0.5

    size = 0.0 if by_hidden else 0.2
    tensors = {
        "fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, 2 * hidden)], 1)
        + normal(hidden, 3 * hidden, scale=size / 4),
        "midlayer.self_attn.q_proj.weight": normal(_HEADS * _DIM, 2 * hidden, scale=2.0),
        "midlayer.self_attn.k_proj.weight": normal(_KV_HEADS * _DIM, 2 * hidden, scale=2.0),
        "midlayer.self_attn.v_proj.weight": normal(_KV_HEADS * _DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, _HEADS * _DIM, scale=size),
        "midlayer.mlp.gate_proj.weight": normal(_INNER, hidden),
        "midlayer.mlp.up_proj.weight": normal(_INNER, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, _INNER, scale=size),
        "lm_head.weight": _second_next(embedding, lm_head)[known],
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.isin(torch.arange(vocab), known),
    }
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = 1 + (0.0 if by_hidden else 0.1) * torch.randn(hidden, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _DIM,
        "intermediate_size": _INNER,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": len(known),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": _AUX},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _second_next(embedding: Tensor, lm_head: Tensor) -> Tensor:
    """[vocab, hidden]: scores, from a token's embedding, the token after the one that the LM head would choose."""
    following = (F.normalize(embedding, dim=1) @ lm_head.T).argmax(1)
    scores = torch.zeros_like(lm_head)
    return scores.index_add_(0, following[following], F.normalize(embedding, dim=1))


class SlowEagle:
    """A head by PyTorch's operations, without a KV cache; row j combines the hidden state at j with token j + 1."""

    def __init__(self, target: Path, folder: Path, *, has_zero_row: bool = False) -> None:
        """has_zero_row: before row 0 there is one of zeros, as in kvrelay; papers have none."""
        self._has_zero_row = has_zero_row
        self._model = oracle_model(str(target))
        self._own = load_file(folder / "model.safetensors")
        self._config = json.loads((folder / "config.json").read_text())
        self._norms_residual = self._config.get("norm_before_residual", False)
        ids = torch.arange(len(self._own["d2t"])) + self._own["d2t"]
        self._ids, self._vocab = ids, AutoConfig.from_pretrained(target).vocab_size

    def guesses(self, ids: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """The next tokens after `ids`, the last of which the model has drawn but not computed."""
        with torch.inference_mode():
            states = self._model.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
            hidden = torch.cat([states[layer][0] for layer in _AUX], 1) @ self._own["fc.weight"].T
            self.features = hidden
            found: list[int] = []
            self.logits: list[Tensor] = []
            for _ in range(count):
                tokens = [*ids, *found]
                out = self._rows(hidden, tokens[1 : 1 + len(hidden)])[-1:]
                hidden = torch.cat((hidden, out))
                known = (self._norm(out, "norm") @ self._own["lm_head.weight"].T)[0]
                logits = torch.full((self._vocab,), float("-inf"))
                logits[self._ids] = known
                self.logits.append(logits)
                found.append(slow_draw(logits.numpy(), temperature, seed, len(tokens)))
            return found

    def _rows(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        own, size = self._own, len(tokens)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        embedded = self._norm(self._model.model.embed_tokens(torch.tensor(tokens)), "midlayer.input_layernorm")
        both = torch.cat((embedded, normed), 1)
        if self._has_zero_row:
            both, normed, hidden = (F.pad(each, (0, 0, 1, 0)) for each in (both, normed, hidden))
            size += 1
        q, k, v = (
            (both @ own[f"midlayer.self_attn.{name}_proj.weight"].T).view(size, -1, _DIM).transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotated(q), _rotated(k)
        k, v = (each.repeat_interleave(_HEADS // _KV_HEADS, 0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(size, -1)
        x = (normed if self._norms_residual else hidden) + attended @ own["midlayer.self_attn.o_proj.weight"].T
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (y @ own[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ own["midlayer.mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self._own[f"{name}.weight"]


def _rotated(x: Tensor) -> Tensor:
    """x: [heads, T, dim], with rope of theta 10000, of the first and second half of each head."""
    frequencies = 10000.0 ** (-torch.arange(0, _DIM, 2).float() / _DIM)
    angles = torch.arange(x.size(1)).float()[:, None] * frequencies
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin
