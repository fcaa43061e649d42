"""A second kind of attention, which only tests know, and a model that has it in every second layer.

Small latent attention: all query heads share one latent per token, which is both key and value, and one rotated key.
"""

from __future__ import annotations

import json
import pickle
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.rank_jobs import BLOCK, connect
from torch import Tensor
from torch.nn import functional as F

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.attention.choose import BACKENDS, choose_attention
from common.engine.runner import ModelRunner
from common.kernels.base import Rotation
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane
from common.kv.storage import GroupStorage, KVStorage
from common.model.attention import ATTENTIONS
from common.model.build import Build, Share
from common.model.config import load_model_config
from common.model.config_file import ConfigFile
from common.model.description import AttentionDescription, LayerDescription, LinearShape, Split, WeightNames
from common.model.families.base import Family, read_attention, read_mlp, read_norm
from common.model.families.registry import FAMILIES
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.model.rope import read_rope
from common.parallel.place import RankPlace

ARCHITECTURE = "TwoKindsForCausalLM"
HIDDEN, HEADS, DIM, INNER, VOCAB, LAYERS = 64, 4, 16, 96, 250, 4
LATENT, ROPE = 24, 8


@dataclass(frozen=True)
class SmallLatentDescription(AttentionDescription):
    kind = "small_latent"
    num_heads: int
    latent_dim: int
    rope_dim: int
    kv: str = "self_attn.kv_proj"
    """Name of the weights of latents and rotated keys."""

    @property
    def width(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def planes(self) -> tuple[KVPlane, ...]:
        return KVPlane("latent", self.latent_dim), KVPlane("rope", self.rope_dim)

    @property
    def plane_heads(self) -> int:
        return 1

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    def linears(self, names: WeightNames, hidden: int) -> list[LinearShape]:
        return [
            LinearShape(names.q, self.num_heads * self.width, hidden),
            LinearShape(self.kv, self.width, hidden),
            LinearShape(names.output, hidden, self.num_heads * self.latent_dim),
        ]

    def splits(self) -> list[Split]:
        return [Split(f"{self.num_heads} heads over latents", lambda ranks: self.num_heads % ranks == 0)]


class LatentAttention:
    """`Attention` of the kind."""

    def __init__(self, build: Build, prefix: str, attention: SmallLatentDescription) -> None:
        place, hidden, names = build.mesh.place, build.config.hidden_size, build.names
        self._own = attention.num_heads // place.tp_size
        self._description, self._dtype, self._mesh = attention, build.precision.wide, build.mesh

        def of_own_heads(width: int) -> Share:
            each = self._own * width
            return Share(place.tp_size * each, place.tp_rank * each, (place.tp_rank + 1) * each)

        merged = [prefix + names.q, prefix + attention.kv]
        shares = [of_own_heads(attention.width), Share(attention.width, 0, attention.width)]
        self._q_kv = build.column_linear(merged, shares, hidden, bias=False)
        own = of_own_heads(attention.latent_dim)
        self._out = build.row_linear(prefix + names.output, own, hidden, bias=False)

    def attend(self, x: Tensor, layer: int, rope: Rotation, backend: AttentionBackend) -> Tensor:
        latent = self._description.latent_dim
        rows = self._q_kv.forward(x).view(x.size(0), self._own + 1, self._description.width)
        rope.rotate_(rows[..., latent:], self._own)
        keys = rows[:, self._own :]
        return backend.forward(layer, rows[:, : self._own], keys[..., :latent], keys[..., latent:]).flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        return self._mesh.all_reduce(self._out.forward(attended))

    def shape(self, block_size: int, max_context: int) -> AttentionShape:
        width = self._description.width
        return AttentionShape(
            self._own, 1, width, self._dtype, block_size, max_context, width**-0.5, kind="small_latent"
        )


class LatentBackend:
    """`AttentionBackend` of the kind, one sequence after the other."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape) -> None:
        self._planes = kv.planes["latent"][:, :, 0], kv.planes["rope"][:, :, 0]
        self._kv, self._shape = kv, shape
        self._scale = shape.head_dim**-0.5

    def plan(self, metadata: AttentionMetadata) -> None:
        self._step = metadata

    def for_graph(self, rows: int) -> LatentBackend:
        return LatentBackend(self._kv, self._shape)

    def forward(self, layer: int, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """q: [T, heads, latent + rope]; latent, rope: [T, 1, dim]. Returns [T, heads, latent]."""
        step = self._step
        for plane, rows in zip(self._planes, (latent, rope), strict=True):
            plane[layer].flatten(0, 1)[step.slot_mapping] = rows[:, 0]
        out: list[Tensor] = []
        first = 0
        for rows, context, table in zip(step.query_lens, step.context_lens, step.block_tables, strict=True):
            blocks = torch.tensor(table)
            values, keys = (plane[layer][blocks].flatten(0, 1)[:context] for plane in self._planes)
            scores = q[first : first + rows].transpose(0, 1) @ torch.cat((values, keys), 1).t() * self._scale
            hidden = torch.ones(rows, context, dtype=torch.bool).triu(context - rows + 1)
            out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
            first += rows
        return torch.cat(out)


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    usual = LayerDescription(read_attention(config), read_mlp(config), read_norm(config), read_rope(config))
    latent = replace(usual, attention=SmallLatentDescription(config.integer("num_attention_heads"), LATENT, ROPE))
    return tuple(latent if number % 2 else usual for number in range(config.num_layers()))


def register(set_item: Any = dict.__setitem__) -> None:
    """Make the kind and the model's family known. `set_item`: that of pytest's monkeypatch, to undo it."""
    set_item(FAMILIES, ARCHITECTURE, Family((ARCHITECTURE,), _describe, default_max_position=512))
    set_item(ATTENTIONS, "small_latent", LatentAttention)
    set_item(BACKENDS, "small_latent", LatentBackend)


def write_model(folder: Path) -> Path:
    """Config and random weights."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    raw = {"architectures": [ARCHITECTURE], **sizes, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "float32", "eos_token_id": 2}))
    config = load_model_config(folder)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "lm_head": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for number, layer in enumerate(config.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{number}.{name}"] = (HIDDEN,)
        for part in (layer.attention, layer.mlp):
            for name, out, inputs in part.linears(config.weight_names, HIDDEN):
                shapes[f"model.layers.{number}.{name}"] = (out, inputs)
    drawn = torch.Generator().manual_seed(3)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=drawn) * (2.0 / HIDDEN**0.5 if len(shape) > 1 else 0.2)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """[tokens, vocab] by plain operations on whole sequences."""
    weights = load_file(folder / "model.safetensors")
    x, n = weights["model.embed_tokens.weight"][token_ids], len(token_ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[f"{name}.weight"], 1e-6)

    def rotated(x: Tensor) -> Tensor:
        dim = x.size(-1)
        angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    for number in range(LAYERS):
        at = f"model.layers.{number}."

        def linear(x: Tensor, name: str, at: str = at) -> Tensor:
            return x @ weights[f"{at}{name}.weight"].t()

        own = norm(x, f"{at}input_layernorm")
        q = linear(own, "self_attn.q_proj").view(n, HEADS, -1).transpose(0, 1)
        if number % 2:
            kv = linear(own, "self_attn.kv_proj")
            keys = torch.cat((kv[:, :LATENT], rotated(kv[:, LATENT:])), -1).expand(HEADS, -1, -1)
            values = kv[:, :LATENT].expand(HEADS, -1, -1)
            q = torch.cat((q[..., :LATENT], rotated(q[..., LATENT:])), -1)
        else:
            keys, values = (
                linear(own, f"self_attn.{side}_proj").view(n, 2, -1).transpose(0, 1).repeat_interleave(2, 0)
                for side in "kv"
            )
            q, keys = rotated(q), rotated(keys)
        mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        x = x + linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")
        own = norm(x, f"{at}post_attention_layernorm")
        x = x + linear(F.silu(linear(own, "mlp.gate_proj")) * linear(own, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ weights["lm_head.weight"].t()


def replay(
    place: RankPlace, port: int, listener: socket.socket | None, *, model: str, steps: str, pp_layers: list[int]
) -> list[int]:
    """A job of `support.rank_processes`: run pickled steps on a rank's part of the model. Returns the drawn tokens."""
    torch.set_num_threads(1)
    register()
    mesh = connect(place, port, listener, same_host=True)
    config, pp = load_model_config(Path(model)), tuple(pp_layers)
    layout = KVLayout("f", kv_spec(config, "float32"), tp_size=place.tp_size, pp_layers=pp)
    storage = KVStorage(layout, layout.shard(place.tp_rank, place.pp_rank), 400)
    share = load_model(
        Path(model), config, dtype="float32", load_format="auto", seed=0, small_batches=True, mesh=mesh, pp_layers=pp
    )
    runner = ModelRunner(share, storage, choose_attention(storage, share.attention_shapes(BLOCK)))
    outputs = [runner.execute(step) for step in pickle.loads(Path(steps).read_bytes())]
    mesh.agree("replayed", "all")
    mesh.close()
    return [token.token_id for output in outputs for token in output.sampled]
