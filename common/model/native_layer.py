"""A decoder layer as three calls into the native kernels. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.attention.native import NativeAttention
from common.kernels.base import Rotation
from common.kernels.native.kernels import NativeRotation
from common.kernels.native.library import DTYPES, LayerStruct, NativeLibrary
from common.kernels.native.linear import NativeLinear
from common.model.decoder_layer import DecoderLayer
from common.model.layers import GatedMlp
from common.parallel.mesh import Mesh


class NativeLayer:
    """A `DecoderLayer` all of whose parts the native kernels have."""

    def __init__(self, layer: DecoderLayer, native: NativeLibrary, mesh: Mesh, dtype: torch.dtype) -> None:
        """dtype: of hidden states."""
        self._layer = layer  # keeps the memory that `_struct` points to; runs over other attention backends
        self._native = native
        self._mesh = mesh
        self._index = layer.index
        self.kv_scales = layer.kv_scales
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, GatedMlp)
        head_norm = attention.head_norm
        self._struct = LayerStruct(
            *(_struct_of(linear) for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down)),
            layer.input_norm.weight.data_ptr(),
            layer.mlp_norm.weight.data_ptr(),
            None if head_norm is None else head_norm.weights.data_ptr(),
            layer.input_norm.eps,
            layer.mlp_norm.eps,
            0.0 if head_norm is None else head_norm.eps,
            attention.scale,
            layer.input_norm.weight.size(0),
            *attention.heads,
            DTYPES[dtype],
        )
        self._address = ctypes.addressof(self._struct)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rotation,
        backend: AttentionBackend,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """As `DecoderLayer.forward`; overwrites `delta` and returns it."""
        if not isinstance(backend, NativeAttention) or not isinstance(rope, NativeRotation):
            return self._layer.forward(x, delta, rope, backend, on_layer)
        native, rows, residual = self._native, x.size(0), x.data_ptr()
        given = None if delta is None else delta.data_ptr()
        native.layer_attend(
            native.team, self._address, backend.cache(self._index), backend.batch, rope.address, residual, given
        )
        if on_layer is not None:
            on_layer(self._index)
        delta = torch.empty_like(x) if delta is None else delta
        native.layer_project(native.team, self._address, rows, delta.data_ptr())
        self._mesh.all_reduce(delta)
        native.layer_mlp(native.team, self._address, rows, residual, delta.data_ptr())
        return self._mesh.all_reduce(delta)


def as_native(layer: DecoderLayer, native: NativeLibrary, mesh: Mesh, dtype: torch.dtype) -> DecoderLayer | NativeLayer:
    """`layer` over the native kernels if they have all that it needs, else itself."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, GatedMlp) or mlp.activation != "silu":
        return layer
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    if not all(isinstance(linear, NativeLinear) for linear in linears):
        return layer
    return NativeLayer(layer, native, mesh, dtype)


def _struct_of(linear: object):
    assert isinstance(linear, NativeLinear)
    return linear.struct
