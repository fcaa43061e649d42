"""A rank's layers as one call into the native kernels. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.attention.grouped import backend_of
from common.attention.native import NativeAttention
from common.kernels.native.kernels import NativeRotary, NativeRotation
from common.kernels.native.linear import NativeLinear
from common.model.decoder_layer import DecoderLayer, ForwardContext
from common.model.lora.adapters import Adapters
from common.model.native_layer import NativeLayer
from common.model.norms import RMSNorm
from common.parallel.mesh import Mesh


class LayerMemory(NamedTuple):
    """Addresses that a backend has for each layer: of a struct kv_cache and a struct kv_batch."""

    caches: ctypes.Array[ctypes.c_void_p]
    batches: ctypes.Array[ctypes.c_void_p]


class NativeStack:
    """All layers of a rank. A step that needs something between them (adapters, a report of each layer's KV) runs layer
    by layer."""

    def __init__(self, layers: Sequence[NativeLayer], adapters: Adapters) -> None:
        """layers: with the same rotary embedding."""
        self._layers = layers
        self._adapters = adapters
        self.native = layers[0].native
        self.addresses = _pointers([layer.address for layer in layers])
        """Addresses of the kv_layer structs, in the order of the layers."""
        self._latest: tuple[AttentionBackend, LayerMemory | None] | None = None

    def forward(self, x: Tensor, delta: Tensor | None, context: ForwardContext) -> Tensor:
        """Run all layers: `DecoderLayer.forward`."""
        backend = context.backend
        [rope] = context.rotations
        if self._latest is None or self._latest[0] is not backend:
            self._latest = backend, self.memory(backend)
        memory = self._latest[1]
        is_plain = delta is None and context.on_layer is None and self._adapters.runs is None
        if memory is None or not is_plain or not isinstance(rope, NativeRotation):
            for layer in self._layers:
                delta = layer.forward(x, delta, context)
            assert delta is not None
            return delta
        delta = torch.empty_like(x)
        native, count, rows = self.native, len(self._layers), (x.data_ptr(), delta.data_ptr())
        native.layers_forward(native.team, count, self.addresses, *memory, rope.address, *rows)
        return delta

    def memory(self, backend: AttentionBackend) -> LayerMemory | None:
        """The memory of `backend`; None if a layer has another backend than the native one."""
        caches, batches = [], []
        for layer in range(len(self._layers)):
            own, index = backend_of(backend, layer)
            if not isinstance(own, NativeAttention):
                return None
            caches.append(own.cache(index))
            batches.append(own.batch)
        return LayerMemory(_pointers(caches), _pointers(batches))


@dataclass(frozen=True)
class ModelParts:
    """All of a model on one rank, where the native kernels have every part."""

    embedding: Tensor
    """[vocab, hidden], of the dtype of hidden states."""
    rotary: NativeRotary
    stack: NativeStack
    norm: RMSNorm
    lm_head: NativeLinear


Layer = DecoderLayer | NativeLayer | NativeStack


def as_stack(layers: Sequence[DecoderLayer | NativeLayer], adapters: Adapters, mesh: Mesh) -> Sequence[Layer]:
    """`layers`, which have the same rotary embedding, as one `NativeStack` if they can be."""
    native = [layer for layer in layers if isinstance(layer, NativeLayer) and layer.is_whole]
    return layers if mesh.place.tp_size > 1 or len(native) < len(layers) else [NativeStack(native, adapters)]


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
