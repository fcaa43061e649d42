"""A rank's layers as one call into the native kernels. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.attention.grouped import backend_of
from common.attention.native import NativeAttention
from common.kernels.base import Rotation
from common.kernels.native.kernels import NativeRotary, NativeRotation
from common.kernels.native.linear import NativeLinear
from common.model.decoder_layer import DecoderLayer, Layer, RotatedLayer
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

    def __init__(self, layers: Sequence[Layer], wholes: Sequence[NativeLayer], adapters: Adapters) -> None:
        """layers: `wholes`, with adapters."""
        self._layers = layers
        self._adapters = adapters
        self.native = wholes[0].native
        self.addresses = _pointers([whole.address for whole in wholes])
        """Addresses of the kv_layer structs, in the order of the layers."""
        self._latest: tuple[AttentionBackend, LayerMemory | None] | None = None

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rotation,
        backend: AttentionBackend,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """Run all layers: `DecoderLayer.forward`."""
        if self._latest is None or self._latest[0] is not backend:
            self._latest = backend, self.memory(backend)
        memory = self._latest[1]
        is_plain = delta is None and on_layer is None and not self._adapters.are_in_step
        if memory is None or not is_plain or not isinstance(rope, NativeRotation):
            for layer in self._layers:
                delta = layer.forward(x, delta, rope, backend, on_layer)
            assert delta is not None
            return delta
        delta = torch.empty_like(x)
        native = self.native
        native.layers_forward(
            native.team,
            len(self._layers),
            self.addresses,
            memory.caches,
            memory.batches,
            rope.address,
            x.data_ptr(),
            delta.data_ptr(),
        )
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


def as_stack(
    layers: Sequence[Layer], wholes: Sequence[DecoderLayer | NativeLayer], adapters: Adapters, mesh: Mesh
) -> Sequence[Layer]:
    """`layers`, as one `NativeStack` if they can be."""
    native = [whole for whole in wholes if isinstance(whole, NativeLayer) and whole.is_whole]
    is_alone = mesh.place.tp_size == 1
    if not is_alone or len(native) < len(layers) or any(isinstance(layer, RotatedLayer) for layer in layers):
        return layers
    return [NativeStack(layers, native, adapters)]


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
