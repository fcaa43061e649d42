"""The noise of Gumbel-max sampling: its numbers, its distribution, and how little the last bits of logits matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.sampling.gumbel import (
    gumbel_argmax,
    gumbel_argmax_on_device,
    noise_key,
    strides_of,
    uniforms,
    uniforms_on_device,
)

VOCAB = 151_936


def keys_on_device(keys: list[tuple[int, int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(keys, np.uint32).view(np.int32))


def weights_of(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.exp(logits - logits.max())


def test_numbers_are_pinned_because_nodes_of_two_versions_must_agree() -> None:
    assert [noise_key(0, 0), noise_key(1, 7), noise_key(-1, 7)] == [
        (2960257231, 1232652352),
        (1557304831, 703715045),
        (4203969771, 3616602622),
    ]
    assert uniforms(noise_key(1, 7), strides_of(np.array([0, 1, 151_935]))).tolist() == [
        0.38281676173210144,
        0.7464633584022522,
        0.9141507148742676,
    ]


def test_a_device_has_the_numbers_of_the_host_bit_for_bit() -> None:
    keys = [noise_key(seed, 3 * seed) for seed in range(20)]
    on_device = uniforms_on_device(keys_on_device(keys), VOCAB).numpy()
    for row, key in zip(on_device, keys, strict=True):
        np.testing.assert_array_equal(row, uniforms(key, strides_of(np.arange(VOCAB))))
    assert on_device.min() > 0.0
    assert on_device.max() <= 1.0


def test_numbers_are_uniform_and_those_of_neighbours_have_nothing_to_do_with_each_other() -> None:
    """Neighbours: the next token, the next position, the next seed. Bounds are five standard deviations."""
    rows = np.array(
        [[uniforms(noise_key(seed, p), strides_of(np.arange(2000))) for p in range(30)] for seed in range(10)]
    )
    n = rows.size
    counts = np.bincount((rows * 64).astype(int).clip(max=63).ravel(), minlength=64)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
    x = rows - 0.5
    for axis in range(3):
        a, b = x.take(range(x.shape[axis] - 1), axis), x.take(range(1, x.shape[axis]), axis)
        assert abs((a * b).mean() * 12) < 5 / np.sqrt(a.size)
    for bit in range(20):
        ones = ((rows * 2**31).astype(np.int64) >> (30 - bit)) & 1
        assert abs(ones.mean() - 0.5) < 5 * 0.5 / np.sqrt(n), bit


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.05, 0.05], [1.0, 1.0, 1.0], [1.0, 1e-3, 0.0, 0.5, 1e-4]])
def test_tokens_are_drawn_as_often_as_they_weigh(weights: list[float]) -> None:
    draws = 40_000
    w = np.array(weights, np.float32)
    got = np.bincount([gumbel_argmax(w, noise_key(5, position)) for position in range(draws)], minlength=w.size)
    want = draws * w / w.sum()
    assert (np.abs(got - want) <= 5 * np.sqrt(want)).all(), (got, want)


def test_the_tail_of_a_large_vocabulary_gets_its_share() -> None:
    w = np.full(VOCAB, 1e-6, np.float32)
    w[77] = 1.0
    draws = 2000
    tail = [at for position in range(draws) if (at := gumbel_argmax(w, noise_key(6, position))) != 77]
    want = draws * 0.151935 / 1.151935
    assert abs(len(tail) - want) < 5 * np.sqrt(want)
    assert abs(np.mean(tail) / VOCAB - 0.5) < 5 * 0.29 / np.sqrt(len(tail))


def test_host_and_device_draw_the_same_also_among_few_of_many() -> None:
    draw = np.random.default_rng(1)
    rows = weights_of(3 * draw.standard_normal((60, 5000), np.float32))
    rows[30:, ::3] = 0.0
    keys = [noise_key(7, position) for position in range(60)]
    want = [gumbel_argmax(row, key) for row, key in zip(rows, keys, strict=True)]
    assert gumbel_argmax_on_device(torch.from_numpy(rows.copy()), keys_on_device(keys)).tolist() == want
    for row, key, at in zip(rows, keys, want, strict=True):
        ids = np.flatnonzero(row)
        assert ids[gumbel_argmax(row[ids], key, ids)] == at


@pytest.mark.parametrize("temperature", [1e-5, 0.1, 1.0, 3.0, 100.0])
def test_tokens_that_the_host_skips_could_not_have_been_drawn(temperature: float) -> None:
    draw = np.random.default_rng(3)
    for position in range(200):
        logits = (draw.standard_normal(400, np.float32) / temperature).astype(np.float32)
        logits[draw.random(400) < draw.choice([0.0, 0.5, 0.99])] = -np.inf
        logits[7] = 1.0
        weights, key = weights_of(logits), noise_key(10, position)
        v = uniforms(key, strides_of(np.arange(400))).astype(np.float64)
        assert gumbel_argmax(weights, key) == (weights / -np.log1p(-v.clip(max=1 - 2.0**-24))).argmax()


def test_the_last_bits_of_logits_hardly_ever_change_a_draw() -> None:
    """By the inverse of the cumulative distribution six of these 300 draws would be others."""
    draw = np.random.default_rng(2)
    for position in range(300):
        logits = 2.5 * draw.standard_normal(VOCAB, np.float32)
        noise = 1e-6 * np.abs(logits) * draw.standard_normal(VOCAB, np.float32)
        again = logits + noise.astype(np.float32)
        key = noise_key(8, position)
        assert gumbel_argmax(weights_of(logits), key) == gumbel_argmax(weights_of(again), key)


def test_the_only_possible_token_is_drawn_whatever_its_noise() -> None:
    for position in range(3000):
        key = noise_key(9, position)
        assert gumbel_argmax(np.array([0.0, 1.0, 0.0], np.float32), key) == 1
        assert gumbel_argmax(np.array([0.3], np.float32), key, np.array([12])) == 0
