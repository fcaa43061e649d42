"""The choice of kernels for a rank's model. Made once, before it loads."""

from __future__ import annotations

import torch

from common.kernels.base import Kernels
from common.kernels.flashinfer_kernels import DTYPES, FlashInferKernels
from common.kernels.library import find_flashinfer
from common.kernels.native.find import describe_native, find_native
from common.kernels.native.kernels import NativeKernels
from common.kernels.torch_kernels import TORCH


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Choose native kernels on a CPU, flashinfer's on a GPU if activations have 16 bits, else PyTorch's.

    dtype: of activations and norm weights.
    """
    if device.type == "cpu":
        native = find_native()
        return TORCH if native is None else NativeKernels(native)
    if device.type != "cuda" or dtype not in DTYPES:
        return TORCH
    flashinfer = find_flashinfer(device).flashinfer
    return TORCH if flashinfer is None else FlashInferKernels(flashinfer)


def describe_kernels(device: torch.device) -> str:
    """The library whose kernels run on `device`, for operators; if it is PyTorch, also why."""
    if device.type == "cpu":
        return describe_native()
    library = find_flashinfer(device)
    return (
        f"PyTorch ({library.reason})" if library.flashinfer is None else f"flashinfer {library.flashinfer.__version__}"
    )
