"""Norms of hidden states and of heads. They run on a rank's engine thread, under inference mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from common.kernels.base import Kernels
from common.model.build import Build
from common.model.description import MultiHeadDescription, NormDescription, implementation
from common.model.sharding import HeadRange
from common.model.tensor_files import Part
from common.parallel.mesh import Mesh


class RMSNorm:
    """Root-mean-square norm over the last axis."""

    def __init__(self, build: Build, name: str, norm: NormDescription, width: int | None = None) -> None:
        """`width`: of the last axis; None: that of hidden states."""
        weight = build.read(f"{name}.weight", width or build.config.hidden_size)
        self._kernels = build.kernels.with_norm_offset(norm.weight_offset)
        self.weight = self._kernels.norm_weight(weight)
        self.eps = norm.eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of `x`, to which `delta` is added in place before; may overwrite `delta`. Both [T, hidden]."""
        if delta is None:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        return self._kernels.add_rms_norm_(delta, x, self.weight, self.eps)


class LayerNorm:
    """Layer norm with bias over the last axis, computed in float32."""

    def __init__(self, build: Build, name: str, norm: NormDescription) -> None:
        hidden = build.config.hidden_size
        self._weight, self._bias = (build.read(f"{name}.{part}", hidden).float() for part in ("weight", "bias"))
        self._eps = norm.eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is not None:
            x.add_(delta)
        return F.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(x.dtype)


class NoNorm:
    """Stands in for the norm of layers whose inputs have none: it only adds the residual."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        return x if delta is None else x.add_(delta)


Norm = RMSNorm | LayerNorm | NoNorm
NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""Norms over hidden states, by `NormDescription.kind`."""


def make_norm(build: Build, name: str, norm: NormDescription) -> RMSNorm | LayerNorm:
    """The norm over hidden states whose weight is `name`.weight."""
    return implementation("norm", norm.kind, NORMS)(build, name, norm)


class HeadNorm:
    """RMS norm over each head of q and k, which lie side by side: [T, q_heads + kv_heads, head_dim]."""

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: HeadRange, eps: float, kernels: Kernels) -> None:
        self.weights = kernels.head_weights(q_weight, k_weight, heads.num_q, heads.num_kv)
        self.eps = eps
        self._num_q = heads.num_q
        self._kernels = kernels

    def forward(self, qk: Tensor) -> Tensor:
        return self._kernels.norm_heads(qk, self.weights, self._num_q, self.eps)


class JointNorm:
    """RMS norm over all heads of q, and over all of k, which lie side by side: [T, q_heads + kv_heads, head_dim].

    All ranks hold the same number of heads, and all KV heads are on the same number of ranks: the mean over a stage's
    heads is that of its ranks' means.
    """

    def __init__(self, q_weight: Tensor, k_weight: Tensor, eps: float, mesh: Mesh) -> None:
        """q_weight: [q_heads, head_dim], k_weight: [kv_heads, head_dim], of this rank's heads."""
        self._weights = torch.cat((q_weight, k_weight)).float()
        self._num_q = q_weight.size(0)
        sides = [0] * q_weight.size(0) + [1] * k_weight.size(0)
        self._side_of_head = torch.tensor(sides, device=q_weight.device)
        self._eps = eps
        self._mesh = mesh

    def forward(self, qk: Tensor) -> Tensor:
        """May overwrite `qk`."""
        wide = qk.float()
        sides = wide[:, : self._num_q], wide[:, self._num_q :]
        means = torch.stack([side.square().mean((1, 2)) for side in sides], 1)
        means = self._mesh.all_reduce(means).div_(self._mesh.place.tp_size)
        factors = means.add_(self._eps).rsqrt_().index_select(1, self._side_of_head)
        return wide.mul_(factors[:, :, None]).mul_(self._weights).to(qk.dtype)


def make_qk_norm(build: Build, prefix: str, attention: MultiHeadDescription) -> HeadNorm | JointNorm | None:
    """The norm of q and k before rope; None if there is none. `prefix`: the layer's name and a dot."""
    q_name, k_name = (f"{prefix}{name}.weight" for name in (build.names.q_norm, build.names.k_norm))
    heads, dim = build.heads(attention), attention.head_dim
    if attention.head_norm is not None:
        norm, kernels = attention.head_norm, build.kernels.with_norm_offset(attention.head_norm.weight_offset)
        q, k = (kernels.norm_weight(build.read(name, dim)) for name in (q_name, k_name))
        return HeadNorm(q, k, heads, norm.eps, kernels)
    if attention.joint_norm is not None:
        q = build.read(q_name, attention.num_q_heads * dim, part=Part(0, heads.q_lo * dim, heads.q_hi * dim))
        k = build.read(k_name, attention.num_kv_heads * dim, part=Part(0, heads.kv_lo * dim, heads.kv_hi * dim))
        return JointNorm(q.view(-1, dim), k.view(-1, dim), attention.joint_norm.eps, build.mesh)
    return None
