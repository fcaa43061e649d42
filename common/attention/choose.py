"""Chooses a rank's attention backend, once, when its KV memory is allocated."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common.attention.base import AttentionBackend, AttentionShape
from common.attention.cpu import CpuAttention
from common.attention.flashinfer import FlashInferAttention, unsupported_reason
from common.attention.flashinfer_latent import FlashInferLatent
from common.attention.flashinfer_latent import unsupported_reason as latent_unsupported_reason
from common.attention.grouped import GroupedAttention, attention_of_groups
from common.attention.latent import LatentBackend, LatentShape
from common.attention.native import NativeAttention, NativePartialAttention
from common.attention.sdpa import SdpaAttention
from common.attention.striped import MakePartial, StripedAttention, TorchPartialAttention
from common.kernels.library import find_flashinfer
from common.kernels.native.find import find_native
from common.kernels.native.library import DTYPES
from common.kv.storage import GroupStorage, KVStorage
from common.parallel.mesh import SOLO, Mesh

log = logging.getLogger(__name__)

_SHORT_CONTEXT = 4096


def choose_attention(storage: KVStorage, shapes: Sequence[AttentionShape], mesh: Mesh = SOLO) -> AttentionBackend:
    """The attention backends for the device of `storage`. `shapes`: of each layer of the rank. `mesh`: the ranks that may hold
    other blocks of the same sequences."""
    if mesh.place.cp_size > 1:
        return attention_of_groups(storage, shapes, lambda kv, shape: _choose_striped(kv, shape, mesh))
    return attention_of_groups(storage, shapes, lambda kv, shape: BACKENDS[shape.kind](kv, shape))


def _choose_striped(kv: GroupStorage, shape: AttentionShape, mesh: Mesh) -> AttentionBackend:
    """Latents are attended to absorbed, also by prompts: expanding would repeat on every rank."""
    striped = StripedAttention(kv, shape, mesh, choose_partial(kv))
    return LatentBackend(kv, shape, striped, expands=False) if isinstance(shape, LatentShape) else striped


def choose_partial(kv: GroupStorage) -> MakePartial:
    """Choose the attention to one stripe: on a CPU the native kernels if they read the KV dtype (not float16), else PyTorch's
    operations."""
    native = find_native() if kv.device.type == "cpu" else None
    if native is None or kv.dtype not in DTYPES:
        return TorchPartialAttention
    return partial(NativePartialAttention, native=native)


def _choose_multi_head(kv: GroupStorage, shape: AttentionShape) -> AttentionBackend:
    """On a CPU the native backend if it reads the KV dtype (not float16), else PyTorch's operations. On a GPU flashinfer if
    it has kernels for this model, else PyTorch's SDPA, with a warning in the log."""
    device = kv.device
    if device.type == "cpu":
        native = find_native()
        if native is None or kv.dtype not in DTYPES:
            return CpuAttention(kv, shape)
        return NativeAttention(kv, shape, native)
    flashinfer = find_flashinfer(device).flashinfer
    if flashinfer is None:
        return SdpaAttention(kv, shape)
    reason = unsupported_reason(shape, kv.dtype)
    if reason:
        _warn_once(reason)
        return SdpaAttention(kv, shape)
    return FlashInferAttention(kv, shape, flashinfer)


def _choose_latent(kv: GroupStorage, shape: LatentShape) -> AttentionBackend:
    """The backends of several heads over one plane for the absorbed part; on a GPU flashinfer if it has a kernel for these
    latents, else PyTorch's SDPA, with a warning in the log."""
    if kv.device.type == "cpu":
        return LatentBackend(kv, shape, _choose_multi_head(kv, shape))
    flashinfer = find_flashinfer(kv.device).flashinfer
    reason = "" if flashinfer is None else latent_unsupported_reason(shape, kv.dtype)
    if reason:
        _warn_once(reason)
    if flashinfer is None or reason:
        return LatentBackend(kv, shape, SdpaAttention(kv, shape))
    return LatentBackend(kv, shape, FlashInferLatent(kv, shape, flashinfer))


BACKENDS: dict[str, Callable[[GroupStorage, Any], AttentionBackend]] = {
    "multi_head": _choose_multi_head,
    "latent": _choose_latent,
}
"""For each kind of attention, what chooses a backend for layers of one group that have one shape."""


@functools.cache
def _warn_once(reason: str) -> None:
    """Log each reason once, however often KV memory is allocated."""
    log.warning("attention uses PyTorch on gathered KV blocks, which is slower: %s", reason)


def worth_capturing(attention: AttentionBackend, max_context: int) -> bool:
    """Whether a decode step replayed as a CUDA graph is faster than an eager one.

    In a graph `SdpaAttention` reads the longest possible context for every row, whatever the sequences' lengths.
    """
    if isinstance(attention, GroupedAttention):
        return all(worth_capturing(backend, max_context) for backend in attention.backends)
    if isinstance(attention, LatentBackend):
        return worth_capturing(attention.absorbed, max_context)
    return not isinstance(attention, SdpaAttention) or max_context <= _SHORT_CONTEXT
