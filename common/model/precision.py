"""The rule for which dtype a batch computes in. Applied once per process, when a model loads.

On a GPU, and with the native CPU kernels, everything computes in the dtype of the weights (the native kernels make
float16 weights float32). With PyTorch's operations, a CPU without native bfloat16 arithmetic (no AVX512-BF16, no
AMX) emulates bf16 GEMMs: measured on one such machine, packed, 14-20 GB/s of weights at one row but 24 GFLOP/s at 8 rows
and 47 at 512, where fp32 does 57 and 165-250. There a single row, bound by reading weights, runs on the bf16 weights,
and from two rows on the whole forward runs in fp32, on fp32 copies of the same bf16 values. That costs three times the
memory of the bf16 weights; a node that never sees single rows (`small_batches=False`) leaves out the bf16 copy.
Activations of a wide batch are thus more exact than bf16, never less.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from common.base.device import CPU

log = logging.getLogger(__name__)

_NARROW_ROWS = 1
"""Maximum rows of a product that is bound by reading weights, not by arithmetic (at 2, emulated bf16 is slower)."""


@dataclass(frozen=True)
class Precision:
    """`weight`: the values of the weights; `narrow`, `wide`: what a batch of one row, of more rows, computes in."""

    weight: torch.dtype
    narrow: torch.dtype
    wide: torch.dtype

    def for_rows(self, rows: int) -> torch.dtype:
        """The dtype of activations and weights in a product with this many rows."""
        return self.narrow if rows <= _NARROW_ROWS else self.wide

    @property
    def packs(self) -> tuple[torch.dtype, ...]:
        """The dtypes in which each weight matrix is kept."""
        return (self.narrow,) if self.narrow == self.wide else (self.narrow, self.wide)

    @staticmethod
    def choose(
        dtype: str, *, small_batches: bool, device: torch.device = CPU, has_native_kernels: bool = False
    ) -> Precision:
        """The rule above, for `device`. `dtype`: of `ModelConfig.resolve_dtype`."""
        weight: torch.dtype = getattr(torch, dtype)
        if has_native_kernels and weight == torch.float16:
            weight = torch.float32
        computes_bf16 = has_native_kernels or native_bf16()
        if device.type != "cpu" or weight == torch.float32 or (weight == torch.bfloat16 and computes_bf16):
            return Precision(weight, weight, weight)
        keep_narrow = small_batches and weight == torch.bfloat16 and can_pack(weight)
        kept = "bfloat16 for single rows and float32 for wider batches" if keep_narrow else "float32 only"
        log.info("this CPU has no native %s arithmetic: weights are kept in %s", dtype, kept)
        return Precision(weight, weight if keep_narrow else torch.float32, torch.float32)


FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)


@functools.cache
def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than fp32 ones."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked linear layers exist here and take `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    try:
        with torch.inference_mode():
            pack = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=dtype), 16)
            torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 32, dtype=dtype), pack, None, "none", [], "")
    except (RuntimeError, NotImplementedError) as error:
        log.info("oneDNN does not prepack %s weights here, falling back to plain products: %s", dtype, error)
        return False
    return True
