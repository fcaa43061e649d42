"""Quantizes floating-point weights while they load (`--quantization int8` or `int4`). Used by a rank's main thread.

A whole matrix is quantized before a rank takes its part, so that the weights do not depend on how ranks share them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from common.config.option_groups import Quantization
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.groupwise import INT4_GROUP, make_group_linear, quantize_int4, stack_groups
from common.model.formats.int8 import make_int8_linear, quantize_int8, stack_int8

log = logging.getLogger(__name__)

WeightBits = Literal["int8", "int4"]


def weight_bits(quantization: Quantization) -> WeightBits | None:
    """Bits to which `--quantization` rounds floating-point weights; None: it keeps them."""
    return quantization if quantization in ("int8", "int4") else None


def quantize_linear(
    to: WeightBits,
    stacked: Sequence[StoredTensor],
    read: Callable[[StoredTensor], Tensor],
    bias: Tensor | None,
    target: LinearTarget,
) -> Linear:
    """The layer of these weights, stacked. `read` returns a whole matrix, [out, in], on the layer's device.

    int4 needs rows that are a multiple of a group; others become int8. Raises: ConfigError as `GroupWeight.cut`.
    """
    columns = stacked[0].shape[1]
    if to == "int4" and columns % INT4_GROUP == 0:
        groups = stack_groups([quantize_int4(read(stored)).cut(stored) for stored in stacked])
        assert groups is not None
        return make_group_linear(groups, bias, target)
    if to == "int4":
        _log_int8(columns)
    weights = [quantize_int8(read(stored)).cut(stored.part) for stored in stacked]
    return make_int8_linear(stack_int8(weights), bias, target)


@functools.cache
def _log_int8(columns: int) -> None:
    log.info("layers of %d inputs become int8: int4 needs a multiple of %d", columns, INT4_GROUP)
