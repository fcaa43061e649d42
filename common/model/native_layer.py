"""A decoder layer as three calls into the native kernels. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from common.attention.grouped import backend_of
from common.attention.native import NativeAttention
from common.attention.striped import StripedAttention
from common.kernels.native.kernels import NativeRotation
from common.kernels.native.library import DTYPES, LayerStruct, LinearStruct, NativeLibrary
from common.kernels.native.linear import NativeLinear
from common.model.attention import MultiHeadAttention
from common.model.decoder_layer import DecoderLayer, ForwardContext
from common.model.description import LayerDescription, MultiHeadDescription
from common.model.lora.adapters import AdaptedLinear, Adapters
from common.model.mlp import DenseMlp, MixtureMlp
from common.model.norms import HeadNorm, RMSNorm
from common.parallel.mesh import Mesh

log = logging.getLogger(__name__)

_NUM_LINEARS = 4
"""Of the struct kv_layer."""


class NativeLayer:
    """A `DecoderLayer` that runs in the native kernels, which have all its parts; a mixture may be one of its own."""

    def __init__(
        self,
        layer: DecoderLayer,
        attention: MultiHeadAttention,
        mlp: DenseMlp | MixtureMlp,
        linears: list[LinearStruct],
        native: NativeLibrary,
        mesh: Mesh,
        dtype: torch.dtype,
        lora: Callable[[], int | None],
    ) -> None:
        """attention, mlp: of the layer. linears: of the struct kv_layer, in its order; without the last two where the MLP
        is a mixture. dtype: of hidden states. lora: `Adapters.of_layer`."""
        self._layer = layer  # keeps the memory that `_struct` points to; runs over other attention backends
        self.native = native
        self._mesh = mesh
        self._lora = lora
        self._heads = attention.heads
        input_norm, mlp_norm, head_norm = layer.input_norm, layer.mlp_norm, attention.qk_norm
        assert isinstance(input_norm, RMSNorm)
        assert isinstance(mlp_norm, RMSNorm)
        assert isinstance(head_norm, HeadNorm | None)
        mixture = mlp.native if isinstance(mlp, MixtureMlp) else None
        self.is_whole = isinstance(mlp, DenseMlp) or mixture is not None
        """Whether the MLP is in the struct, too."""
        self._struct = LayerStruct(
            *linears,
            *[LinearStruct() for _ in range(_NUM_LINEARS - len(linears))],
            None if mixture is None else mixture.address,
            input_norm.weight.data_ptr(),
            mlp_norm.weight.data_ptr(),
            None if head_norm is None else head_norm.weights.data_ptr(),
            input_norm.eps,
            mlp_norm.eps,
            0.0 if head_norm is None else head_norm.eps,
            attention.scale,
            input_norm.weight.size(0),
            *attention.heads,
            DTYPES[dtype],
        )
        self.address = ctypes.addressof(self._struct)
        """Address of the struct kv_layer."""

    def forward(self, x: Tensor, delta: Tensor | None, context: ForwardContext) -> Tensor:
        """Run the layer: `DecoderLayer.forward`. Overwrites `delta` and returns it."""
        layer = self._layer
        rope = context.rotations[layer.rotation]
        own, index = backend_of(context.backend, layer.index)
        if not isinstance(own, NativeAttention | StripedAttention) or not isinstance(rope, NativeRotation):
            return layer.forward(x, delta, context)
        native, rows, residual, lora = self.native, x.size(0), x.data_ptr(), self._lora()
        given = None if delta is None else delta.data_ptr()
        attended: Tensor | None = None
        if isinstance(own, NativeAttention):
            cache = own.cache(index)
            native.layer_attend(native.team, self.address, cache, own.batch, rope.address, lora, residual, given)
        else:
            q_heads, kv_heads, head_dim = self._heads
            qkv = x.new_empty(rows, q_heads + 2 * kv_heads, head_dim)
            native.layer_rows(native.team, self.address, rows, rope.address, lora, residual, given, qkv.data_ptr())
            attended = own.forward(index, *qkv.split((q_heads, kv_heads, kv_heads), 1))
        if context.on_layer is not None:
            context.on_layer(layer.index)
        delta = torch.empty_like(x) if delta is None else delta
        at = None if attended is None else attended.data_ptr()
        native.layer_project(native.team, self.address, rows, lora, at, delta.data_ptr())
        self._mesh.all_reduce(delta)
        if not self.is_whole:
            return layer.mlp.forward(layer.mlp_norm.forward(x, delta))
        native.layer_mlp(native.team, self.address, rows, lora, residual, delta.data_ptr())
        return self._mesh.all_reduce(delta)


def as_native(
    layer: DecoderLayer, native: NativeLibrary, mesh: Mesh, dtype: torch.dtype, adapters: Adapters
) -> DecoderLayer | NativeLayer:
    """`layer` in the native kernels if they have all its parts, else itself, with a line in the log. dtype: of hidden states."""
    reason = _unsupported(layer.description)
    if reason:
        _log_once(reason)
        return layer
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, MultiHeadAttention)
    assert isinstance(mlp, DenseMlp | MixtureMlp)
    linears = [attention.qkv, attention.out, *((mlp.up, mlp.down) if isinstance(mlp, DenseMlp) else ())]
    bases = [linear.base if isinstance(linear, AdaptedLinear) else linear for linear in linears]
    structs = [base.struct for base in bases if isinstance(base, NativeLinear)]
    if len(structs) < len(linears):
        return layer
    return NativeLayer(layer, attention, mlp, structs, native, mesh, dtype, adapters.of_layer(linears))


def _unsupported(layer: LayerDescription) -> str | None:
    """The parts of the layer that whole native layers do not have; None if they have all."""
    attention = layer.attention
    if not isinstance(attention, MultiHeadDescription):
        return f"{attention.kind} attention"
    reasons = {
        f"norm {layer.norm.kind!r}": layer.norm.kind != "rms",
        "norms of outputs": layer.norm_at != "input",
        "a factor of outputs": layer.residual_multiplier != 1.0,
        "no rotary embedding": layer.rope is None,
        "a rotary embedding of parts of heads": layer.rope is not None and layer.rope.rotated_part != 1.0,
        "a norm over all heads": attention.joint_norm is not None,
        f"{layer.mlp.kind} MLP": layer.mlp.kind not in ("gated", "mixture"),
        f"activation {layer.mlp.activation!r}": layer.mlp.kind == "gated" and layer.mlp.activation != "silu",
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies) or None


@functools.cache
def _log_once(reason: str) -> None:
    log.info("layers with %s run part by part on native linear layers, not as whole native layers", reason)
