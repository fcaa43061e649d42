"""Terms of several adapters on the rows of one step, in every variant of the native kernels."""

from __future__ import annotations

import pytest
import torch
from support.native_variants import VARIANTS, native

from common.model.lora.products import AdapterRuns, NativeProducts, Products, Run, Term, TorchProducts


def make_terms(rank: int, inputs: int, parts: list[tuple[int, int]], dtype: torch.dtype) -> list[Term]:
    return [
        Term(torch.randn(rank, inputs).to(dtype), torch.randn(out, rank).to(dtype), 0.5 + first, first)
        for first, out in parts
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [*VARIANTS, "torch"])
def test_each_run_gets_the_terms_of_its_adapter_and_other_rows_stay(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    products: Products = TorchProducts() if variant == "torch" else NativeProducts(native(variant))
    inputs, width = 77, 400
    adapters = {
        1: make_terms(16, inputs, [(0, 300), (300, 37), (337, 63)], dtype),
        2: make_terms(5, inputs, [(40, 290)], dtype),
        3: [],
    }
    for adapter_id, terms in adapters.items():
        if terms:
            products.put(adapter_id, terms)
    runs = [Run(1, 0, 3), Run(2, 4, 5), Run(3, 5, 7), Run(1, 7, 150), Run(2, 150, 153)]
    x, y = torch.randn(160, inputs).to(dtype), torch.randn(160, width).to(dtype)
    expected = y.double()
    for run in runs:
        for term in adapters[run.adapter_id]:
            part = expected[run.lo : run.hi, term.first : term.first + term.b.size(0)]
            part += term.scale * x[run.lo : run.hi].double() @ term.a.double().t() @ term.b.double().t()
    before = y.clone()
    products.add_(y, x, AdapterRuns(runs))
    assert torch.equal(y[3], before[3])
    assert torch.equal(y[5:7], before[5:7])
    assert torch.equal(y[153:], before[153:])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (y - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rows_result_does_not_depend_on_the_other_rows(variant: str) -> None:
    torch.manual_seed(2)
    products = NativeProducts(native(variant))
    products.put(1, make_terms(7, 100, [(0, 70)], torch.float32))
    x, y = torch.randn(70, 100), torch.randn(70, 70)
    together = y.clone()
    products.add_(together, x, AdapterRuns([Run(1, 0, 70)]))
    for row in (0, 1, 37, 63, 64, 69):
        alone = y[row : row + 1].clone()
        products.add_(alone, x[row : row + 1], AdapterRuns([Run(1, 0, 1)]))
        assert torch.equal(alone[0], together[row])


def test_dropped_adapters_add_nothing_more_and_their_memory_is_free() -> None:
    products = NativeProducts(native(VARIANTS[0]))
    products.put(1, make_terms(4, 8, [(0, 8)], torch.float32))
    products.drop(1)
    products.drop(2)
    y = torch.ones(2, 8)
    products.add_(y, torch.ones(2, 8), AdapterRuns([Run(1, 0, 2)]))
    assert torch.equal(y, torch.ones(2, 8))
