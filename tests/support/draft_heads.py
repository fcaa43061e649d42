"""Tiny models with a layer for multi-token prediction (MTP), and what such a layer guesses, computed slowly."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.guessed_answers import slow_draw
from support.oracle import oracle_model, write_model
from support.tiny_models import TINY
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

_SMALL = 0.03
"""Scale of what layers add to hidden states, so that a token mostly depends on the one before it."""
Change = Callable[[dict[str, Tensor], str], None]
"""Changes the tensors of a model. Its second argument: the name of the MTP layer, and a dot."""


def make_mtp(name: str, folder: Path, change: Change | None = None, seed: int = 3) -> Path:
    """Write the tiny model `name` with an MTP layer that is right now and then. Returns `folder`."""
    write_model(TINY[name].config, folder, seed)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[key] *= _SMALL
    last = TINY[name].config.num_hidden_layers - 1
    prefix, generator = f"model.layers.{last + 1}.", torch.Generator().manual_seed(seed)
    for key in [key for key in tensors if key.startswith(f"model.layers.{last}.")]:
        noise = torch.randn(tensors[key].shape, generator=generator)
        own = tensors[key] + 0.1 * tensors[key].std(correction=0) * noise
        tensors[prefix + key.removeprefix(f"model.layers.{last}.")] = own
    hidden = TINY[name].config.hidden_size
    for norm in ("enorm", "hnorm"):
        tensors[f"{prefix}{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    both = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors[f"{prefix}eh_proj.weight"] = both + 0.03 * torch.randn(both.shape, generator=generator)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    if change is not None:
        change(tensors, prefix)
    save_file(tensors, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))
    return folder


def always_right(seed: int, *, by_hidden: bool) -> Change:
    """Weights with which each greedy token is a function f of the one before it, and the MTP layer knows it: from its token, or
    by_hidden: from the hidden state alone. So a layer that reads a wrong row, or a wrong token, is wrong.

    The vocabulary must not be larger than the hidden size: token x is the unit vector x.
    """

    def change(tensors: dict[str, Tensor], prefix: str) -> None:
        vocab, hidden = tensors["lm_head.weight"].shape
        assert vocab <= hidden
        following = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
        permuted = torch.eye(hidden)
        permuted[:vocab, :vocab] = 0
        permuted[following, torch.arange(vocab)] = 1  # from the unit vector x to f(x)
        for key, tensor in tensors.items():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif key.endswith("norm.weight"):
                tensor.fill_(1.0)
        embedding = torch.eye(vocab, hidden)
        for key in ("model.embed_tokens.weight", f"{prefix}embed_tokens.weight"):
            tensors[key] = embedding.clone()
        for key in ("lm_head.weight", f"{prefix}shared_head.head.weight"):
            tensors[key] = permuted[:vocab].clone()
        zero = torch.zeros(hidden, hidden)
        halves = (zero, permuted) if by_hidden else (torch.eye(hidden), zero)
        tensors[f"{prefix}eh_proj.weight"] = torch.cat(halves, 1)

    return change


class SlowMtp:
    """The MTP layer of a folder, by transformers' layer, without a KV cache; row i - 1 of the paper is row i - 1 here."""

    def __init__(self, folder: Path, *, has_zero_row: bool = False) -> None:
        """has_zero_row: before row 0 there is one of zeros, as in kvrelay; the paper has none."""
        self._has_zero_row = has_zero_row
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        config._experts_implementation = "eager"
        self._model = oracle_model(str(folder))
        number = config.num_hidden_layers
        kept = load_file(folder / "model.safetensors")
        prefix = f"model.layers.{number}."
        own = {key.removeprefix(prefix): tensor for key, tensor in kept.items() if key.startswith(prefix)}
        kind = type(self._model.model.layers[-1])
        self._layer = kind(config, number - 1).eval()
        self._layer.load_state_dict(_stacked(own, self._layer.state_dict()))
        self._own, self._eps = own, config.rms_norm_eps

    def guesses(self, ids: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """The next tokens after `ids`, the last of which the model has drawn but not computed: guesses of position len(ids) on."""
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
            self.features = hidden
            found: list[int] = []
            self.logits: list[Tensor] = []
            for _ in range(count):
                tokens = [*ids, *found]
                rows = self._rows(hidden, tokens[1 : 1 + len(hidden)])
                hidden = torch.cat((hidden, rows[-1:]))
                logits = self._norm(rows[-1], "shared_head.norm") @ self._own["shared_head.head.weight"].T
                self.logits.append(logits)
                found.append(slow_draw(logits.numpy(), temperature, seed, len(tokens)))
            return found

    def _rows(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """[T, hidden]: row j of the hidden state at j and token j + 1."""
        embedded = self._model.model.embed_tokens(torch.tensor(tokens))
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), 1)
        if self._has_zero_row:
            both = F.pad(both, (0, 0, 1, 0))
        x = (both @ self._own["eh_proj.weight"].T)[None]
        size = x.size(1)
        positions = torch.arange(size)[None]
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        rotary = self._model.model.rotary_emb(x, positions)
        y = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return (y[0] if isinstance(y, tuple) else y)[0]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._own[f"{name}.weight"]


def _stacked(own: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the names of transformers' layer, which stacks those of experts."""
    found: dict[str, Tensor] = {}
    for key, like in wanted.items():
        if key in own:
            found[key] = own[key]
            continue
        parts = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
        base = key.rpartition(".")[0]
        found[key] = torch.stack(
            [torch.cat([own[f"{base}.{expert}.{part}.weight"] for part in parts]) for expert in range(like.shape[0])]
        )
    return found


@functools.cache
def small_vocabulary(name: str) -> str:
    """The name of a copy of `TINY[name]` with 60 tokens, for `always_right`."""
    config = TINY[name].config
    copied = type(config).from_dict({**config.to_dict(), "vocab_size": 60})
    TINY[f"{name}-60"] = type(TINY[name])(copied)
    return f"{name}-60"
