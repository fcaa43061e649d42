"""Latent attention of one layer on one rank. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.attention.latent import LatentMatrices, LatentShape, NativeLatentMatrices
from common.base.errors import ConfigError
from common.kernels.base import Rotation
from common.kernels.native.linear import PANEL, NativeLinear
from common.model.build import Build, Share
from common.model.latent_description import LatentDescription
from common.model.norms import RMSNorm
from common.model.tensor_files import Part


class LatentAttention:
    """`Attention` of the kind "latent": this rank's query heads; every rank computes and caches all of each token's latent."""

    def __init__(self, build: Build, prefix: str, attention: LatentDescription) -> None:
        """`prefix`: the layer's name and a dot. Raises: ConfigError for what has no implementation."""
        if attention.window is not None or attention.norm.kind != "rms":
            raise ConfigError(
                "the model needs a sliding window or another norm than 'rms' over latents: not implemented"
            )
        hidden, names, place = build.config.hidden_size, build.names, build.mesh.place
        self._heads = attention.num_heads // place.tp_size
        self._description, self._dtype, self._mesh = attention, build.precision.wide, build.mesh

        def of_own_heads(width: int) -> Share:
            own = self._heads * width
            return Share(place.tp_size * own, place.tp_rank * own, (place.tp_rank + 1) * own)

        kv, q = Share(attention.width, 0, attention.width), of_own_heads(attention.q_head_dim)
        q_latent = attention.q_latent_dim
        first = (names.q, q) if q_latent is None else (attention.q_down, Share(q_latent, 0, q_latent))
        merged = [prefix + first[0], prefix + attention.kv_down]
        self._q_kv = build.column_linear(merged, [first[1], kv], hidden, bias=False)
        self._q_width = first[1].count
        self._q_norm = None
        if q_latent is not None:
            self._q_norm = RMSNorm(build, prefix + attention.q_norm, attention.norm, q_latent)
            self._q_up = build.column_linear([prefix + attention.q_up], [q], q_latent, bias=False)
        self._kv_norm = RMSNorm(build, prefix + attention.kv_norm, attention.norm, attention.latent_dim)
        self._matrices = _matrices(
            build, prefix + attention.kv_up, of_own_heads(attention.nope_dim + attention.v_head_dim), attention
        )
        self._out = build.row_linear(prefix + names.output, of_own_heads(attention.v_head_dim), hidden, bias=False)

    def attend(self, x: Tensor, layer: int, rope: Rotation, backend: AttentionBackend) -> Tensor:
        """Returns [T, heads/tp * v_head_dim]."""
        described, heads = self._description, self._heads
        q, kv = self._q_kv.forward(x).split((self._q_width, described.width), 1)
        if self._q_norm is not None:
            q = self._q_up.forward(self._q_norm.forward(q))
        q = q.reshape(x.size(0), heads, described.q_head_dim)
        latent, key = kv.split((described.latent_dim, described.rope_dim), 1)
        rotated = torch.cat((q[..., described.nope_dim :], key[:, None]), 1)
        if described.has_adjacent_pairs:
            rotated = rotated.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        rope.rotate_(rotated, heads)
        q = torch.cat((q[..., : described.nope_dim], rotated[:, :heads]), 2)
        row = torch.cat((self._kv_norm.forward(latent), rotated[:, heads]), 1)
        return backend.forward(layer, q, row[:, None], self._matrices).flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        return self._mesh.all_reduce(self._out.forward(attended))

    def shape(self, block_size: int, max_context: int) -> AttentionShape:
        described = self._description
        of_all = (self._heads, 1, described.width, self._dtype, block_size, max_context, described.scale)
        return LatentShape(
            *of_all,
            latent_dim=described.latent_dim,
            nope_dim=described.nope_dim,
            v_head_dim=described.v_head_dim,
        )


def _matrices(build: Build, name: str, share: Share, attention: LatentDescription) -> LatentMatrices:
    """The matrices of this rank's heads."""
    shape, part = (share.size, attention.latent_dim), Part(0, share.lo, share.hi)
    up = build.dense(f"{name}.weight", shape, part).view(-1, attention.nope_dim + attention.v_head_dim, shape[1])
    if attention.latent_dim % PANEL or attention.v_head_dim % PANEL:
        return LatentMatrices(up, attention.nope_dim)
    keys, values = up.split((attention.nope_dim, attention.v_head_dim), 1)
    to_latents = build.computed_linear(f"{name} {part} to latents", lambda: keys.transpose(1, 2).flatten(0, 1))
    to_values = build.computed_linear(f"{name} {part} to values", lambda: values.flatten(0, 1))
    if not isinstance(to_latents, NativeLinear) or not isinstance(to_values, NativeLinear):
        return LatentMatrices(up, attention.nope_dim)
    return NativeLatentMatrices(up, attention.nope_dim, to_latents, to_values)
