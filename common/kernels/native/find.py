"""What computes on this process's CPU: one of the native kernels' variants, or PyTorch's operations."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.base.variables import CPU_KERNELS
from common.kernels.native import calibration
from common.kernels.native.build import Missing, find_library
from common.kernels.native.calibration import TORCH, Product
from common.kernels.native.library import BFLOAT16, DTYPES, LinearStruct, NativeLibrary
from common.kernels.native.recipe import this_machine, variants

log = logging.getLogger(__name__)

_NOT_MEASURED = ("portable", "amx_emulated")
_OWN_SUMS = {"amx": "amx", "amx_emulated": "amx", "avx512bf16": "bf16", "neonbf16": "bf16"}
"""Variants whose products of bfloat16 numbers are not sums of float32 products in the order of the inputs."""


@dataclass(frozen=True)
class _Found:
    native: NativeLibrary | None
    words: str
    """Why, for operators."""


def find_native() -> NativeLibrary | None:
    """This process's native kernels, with as many threads as PyTorch uses; None, with the reason in the log, if PyTorch's
    operations are used instead.

    Raises: ConfigError for an unknown value of `CPU_KERNELS`.
    """
    return _here().native


def describe_native() -> str:
    """What computes on this CPU, for operators: "native avx512bf16, 2 threads", or "PyTorch", and why."""
    return _here().words


def arithmetic() -> str:
    """How this CPU adds up products of bfloat16 numbers: "amx", "bf16", or "" for sums of float32 products. Nodes that add in
    different ways draw different tokens sooner or later."""
    native = find_native()
    return _OWN_SUMS.get(native.variant, "") if native else ""


def _here() -> _Found:
    return _load(os.environ.get(CPU_KERNELS, ""), torch.get_num_threads())


@functools.cache
def _load(limit: str, threads: int) -> _Found:
    found = _find(limit, threads)
    log.info("kernels: %s", found.words)
    return found


def _find(limit: str, threads: int) -> _Found:
    if limit == TORCH:
        return _Found(None, f"PyTorch ({CPU_KERNELS}=torch)")
    library = find_library()
    if isinstance(library, Missing):
        return _Found(None, f"PyTorch (native kernels: {library.reason})")
    try:
        native = NativeLibrary(library, limit, threads)
    except OSError as error:
        return _Found(None, f"PyTorch (the native kernels do not load: {error})")
    return _Found(native, str(native)) if limit else _fastest(native, library)


def _fastest(native: NativeLibrary, library: Path) -> _Found:
    usual = native.select("")
    choice = calibration.choose(library, native.threads, usual, lambda: _candidates(native))
    if choice is not None and choice.kernels == TORCH:
        return _Found(None, f"PyTorch ({choice})")
    native.select(usual if choice is None else choice.kernels)
    is_compared = choice is not None and len(choice.times_as_long) > 1
    return _Found(native, f"{native} ({choice})" if is_compared else str(native))


@torch.inference_mode()
def _candidates(native: NativeLibrary) -> Mapping[str, Product]:
    """The products of every variant that could be the best one here, and oneDNN's."""
    weights = calibration.make_weights()
    names = [variant.name for variant in variants(this_machine())]
    runs = [name for name in names if name not in _NOT_MEASURED and native.select(name) == name] or ["portable"]
    products: dict[str, Product] = {name: _native_product(native, name, weights) for name in runs}
    if (product := _onednn_product(weights)) is not None:
        products[TORCH] = product
    return products


def _onednn_product(weights: list[Tensor]) -> Product | None:
    """None where oneDNN does not multiply bfloat16 numbers."""
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
        torch.ops.mkldnn._linear_pointwise(weights[0][:1], packed[0], None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        log.info("oneDNN's products are not measured: %s", error)
        return None
    return lambda x, copy: torch.ops.mkldnn._linear_pointwise.default(x, packed[copy], None, "none", [], "")


def _native_product(native: NativeLibrary, variant: str, weights: list[Tensor]) -> Product:
    """`weights` are multiplied as if they were packed: packing only changes the order of the numbers, not the time."""
    out, inputs = weights[0].shape
    bf16 = DTYPES[torch.bfloat16]
    native.select(variant)
    forward = native.linear_forward

    def multiply(x: Tensor, copy: int) -> Tensor:
        y = torch.empty(x.size(0), out, dtype=torch.bfloat16)
        struct = LinearStruct(BFLOAT16, out, inputs, 0, False, weights[copy].data_ptr())
        args = (x.data_ptr(), bf16, inputs, y.data_ptr(), bf16, out, x.size(0))
        forward(native.team, ctypes.addressof(struct), *args)
        return y

    return multiply
