"""The classes that read and multiply weights of each quantization; `quantization.METHODS` is the torch-free half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.model.formats.base import LinearFormat
from common.model.formats.float8 import Fp8Format
from common.model.formats.group_format import GroupFormat
from common.model.formats.int8 import Int8Format
from common.model.formats.mxfp4 import Mxfp4Format
from common.model.formats.quantization import (
    AwqQuantization,
    Fp8Quantization,
    GptqQuantization,
    Int8Quantization,
    Mxfp4Quantization,
    PackedQuantization,
)
from common.model.tensor_files import TensorFiles

FORMATS: dict[type, Callable[[TensorFiles, torch.device, Any], LinearFormat]] = {
    Fp8Quantization: Fp8Format,
    Int8Quantization: Int8Format,
    AwqQuantization: GroupFormat,
    GptqQuantization: GroupFormat,
    PackedQuantization: GroupFormat,
    Mxfp4Quantization: Mxfp4Format,
}
"""By the type of a checkpoint's `Quantization`, which is the last argument. The second one is the device of the layers."""
