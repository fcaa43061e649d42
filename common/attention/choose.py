"""Which attention a rank uses. Decided once, when its KV memory is there."""

from __future__ import annotations

import functools
import logging

from common.attention.base import AttentionBackend, AttentionShape
from common.attention.cpu import CpuAttention
from common.attention.flashinfer import FlashInferAttention, why_not
from common.attention.sdpa import SdpaAttention
from common.kernels.library import find_flashinfer
from common.kv.storage import GroupStorage

log = logging.getLogger(__name__)

_SHORT_CONTEXT = 4096


def choose_attention(kv: GroupStorage, shape: AttentionShape) -> AttentionBackend:
    """On a GPU flashinfer where it has kernels for this model, else PyTorch's SDPA, with a warning in the log."""
    device = kv.device
    if device.type == "cpu":
        return CpuAttention(kv, shape)
    flashinfer = find_flashinfer(device).flashinfer
    if flashinfer is None:
        return SdpaAttention(kv, shape)
    reason = why_not(shape, kv.dtype)
    if reason:
        _announce(reason)
        return SdpaAttention(kv, shape)
    return FlashInferAttention(kv, shape, flashinfer)


@functools.cache
def _announce(reason: str) -> None:
    """Once for each reason, however often memory is laid out."""
    log.warning("attention uses PyTorch on gathered KV blocks, which is slower: %s", reason)


def worth_recording(attention: AttentionBackend, max_context: int) -> bool:
    """Whether a recorded decode step is faster than one that is launched.

    `SdpaAttention` reads the longest possible context for every row, whatever the sequences' lengths.
    """
    return not isinstance(attention, SdpaAttention) or max_context <= _SHORT_CONTEXT
