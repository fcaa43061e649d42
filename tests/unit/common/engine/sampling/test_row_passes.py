"""Masks, sums over rows of a vocabulary and draws from all of its tokens, by NumPy and by every variant of the native kernels."""

from __future__ import annotations

import numpy as np
import pytest
from support.native_variants import VARIANTS, native

from common.engine.sampling.gumbel import noise_key
from common.engine.sampling.row_passes import Draw, NativePasses, RowPasses
from common.kernels.native.library import MAXIMA_OF

ROWS = [0, 3, 4]
VOCABS = [1, 31, 1024, 2050, 152_064]


@pytest.fixture(params=[None, *VARIANTS])
def passes(request: pytest.FixtureRequest) -> RowPasses:
    return RowPasses() if request.param is None else NativePasses(native(request.param))


@pytest.mark.parametrize("bits", [0, 1, 7, 1024, None])
@pytest.mark.parametrize("vocab", VOCABS)
def test_only_the_tokens_of_a_mask_keep_their_logits(passes: RowPasses, vocab: int, bits: int | None) -> None:
    rng = np.random.default_rng(vocab)
    row = rng.normal(0, 5, vocab).astype(np.float32)
    allowed = rng.integers(0, 2, vocab + 64 if bits is None else bits).astype(np.uint8)
    around = np.full(vocab + 2, 7, np.float32)
    passes.mask(row, np.packbits(allowed, bitorder="little").tobytes(), around[1:-1])
    kept = np.zeros(vocab, np.bool_)
    kept[: allowed.size] = allowed[:vocab]
    np.testing.assert_array_equal(around, [7, *np.where(kept, row, -np.inf), 7])


@pytest.mark.parametrize("vocab", VOCABS)
def test_sums_of_some_rows_equal_float64(passes: RowPasses, vocab: int) -> None:
    rows = np.random.default_rng(vocab).normal(0, 5, (6, vocab)).astype(np.float32)
    rows[3, : vocab // 2] = -np.inf
    highest = rows[ROWS].max(1).tolist()
    wide = rows[ROWS].astype(np.float64)
    expected = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
    found = passes.sums(rows, ROWS, highest)
    assert [each.value for each in found] == pytest.approx(expected.tolist(), abs=2e-6)
    whole = vocab // MAXIMA_OF * MAXIMA_OF
    for each, row in zip(found, rows[ROWS], strict=True):
        np.testing.assert_array_equal(each.maxima, row[:whole].reshape(-1, MAXIMA_OF).max(1, initial=-np.inf))


@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_same_tokens_are_drawn_wherever(passes: RowPasses, vocab: int, temperature: float) -> None:
    rows = np.random.default_rng(vocab).normal(0, 4, (8, vocab)).astype(np.float32)
    rows[5, : vocab // 2] = -np.inf
    rows[6] = 0.0
    rows[7, :-1] = -np.inf
    draws = [Draw(row, float(row.max()), temperature, noise_key(i, 7 * i)) for i, row in enumerate(rows)]
    tokens = passes.draw(draws)
    assert tokens == RowPasses().draw(draws)
    assert tokens[7] == vocab - 1
    assert [passes.draw([each]) for each in draws] == [[token] for token in tokens]


def test_nothing_to_draw_or_to_sum(passes: RowPasses) -> None:
    assert passes.draw([]) == []
    assert passes.sums(np.zeros((2, 300), np.float32), [], []) == []
