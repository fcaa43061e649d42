"""What moves with an expert is all that its layers hold, in each form: a layer that got another one's tensors multiplies as it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.native.find import find_native
from common.kernels.native.linear import NativeLinear, pack_float, pack_fp4, pack_int4, pack_int8
from common.model.formats.base import Linear
from common.model.formats.float8 import Fp8Linear, Fp8Weight
from common.model.formats.floating import FloatLinear
from common.model.formats.group_format import ReorderedLinear
from common.model.formats.groupwise import GroupLinear, quantize_int4
from common.model.formats.int8 import Int8Linear, quantize_int8
from common.model.mixture.moving import form_of, tensors_of
from common.model.mixture.placement import Placement
from common.model.mixture.slots import ExpertSlots
from common.model.precision import FLOAT32

OUT, IN = 64, 128


def weight(seed: int, out: int = OUT, inputs: int = IN) -> Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))


def native_linear(seed: int, form: str) -> Linear:
    native = find_native()
    assert native is not None
    w = weight(seed)
    ints, groups = quantize_int8(w), quantize_int4(w)
    codes = (weight(seed + 100) * 4).long().remainder(16).to(torch.uint8)
    scale = weight(seed + 200, OUT, IN // 32).abs()
    packed = {
        "float": lambda: pack_float(w, is_paired=False),
        "int8": lambda: pack_int8(ints.codes, ints.scale, is_paired=True),
        "int4": lambda: pack_int4(groups.codes, groups.scale, groups.zero),
        "mxfp4": lambda: pack_fp4(codes, scale),
    }
    return NativeLinear(native, packed[form](), weight(seed + 300)[:, 0])


def fp8_linear(seed: int, *, is_blocked: bool) -> Fp8Linear:
    values = weight(seed, 256, 256).to(torch.float8_e4m3fn)
    scale = weight(seed + 1, 2, 2) if is_blocked else weight(seed + 1, 256, 1)
    return Fp8Linear(Fp8Weight(values, scale.abs(), is_blocked), None)


FORMS: dict[str, Callable[[int], Linear]] = {
    **{
        f"native {form}": lambda seed, form=form: native_linear(seed, form)
        for form in ("float", "int8", "int4", "mxfp4")
    },
    "float": lambda seed: FloatLinear(weight(seed), weight(seed + 9)[:, 0], FLOAT32),
    "int8": lambda seed: Int8Linear(quantize_int8(weight(seed)), weight(seed + 9)[:, 0]),
    "int4": lambda seed: GroupLinear(quantize_int4(weight(seed)), weight(seed + 9)[:, 0]),
    "act-order": lambda seed: ReorderedLinear(
        torch.randperm(IN, generator=torch.Generator().manual_seed(seed)),
        GroupLinear(quantize_int4(weight(seed)), None),
    ),
    "fp8": lambda seed: fp8_linear(seed, is_blocked=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_got_all_tensors_of_another_multiplies_as_that_one(form: str) -> None:
    source, target = FORMS[form](1), FORMS[form](2)
    x = weight(5, 3, 256 if form == "fp8" else IN)
    expected = source.forward(x)
    assert not torch.allclose(target.forward(x), expected)
    for to, tensor in zip(tensors_of(target), tensors_of(source), strict=True):
        to.copy_(tensor)
    assert torch.equal(target.forward(x), expected)


def test_fp8_blocks_move_with_their_scales() -> None:
    """Only a GPU multiplies them."""
    for linear in (fp8_linear(1, is_blocked=True), fp8_linear(2, is_blocked=False)):
        values, scale = tensors_of(linear)
        assert values.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32


def slots_with(*linears: Linear) -> ExpertSlots:
    slots = ExpertSlots(Placement.initial(len(linears), 1, 0), 0, torch.device("cpu"))
    slots.linears = [(linear, linear) for linear in linears]
    return slots


def test_experts_of_different_forms_and_of_onednn_are_refused() -> None:
    form_of(slots_with(FORMS["int8"](1), FORMS["int8"](2)))
    with pytest.raises(ConfigError, match="in several formats"):
        form_of(slots_with(FORMS["int8"](1), FORMS["int4"](2)))
    packed = FloatLinear(weight(1, 512, 512), None, FLOAT32)
    with pytest.raises(ConfigError, match="oneDNN"):
        form_of(slots_with(packed))
