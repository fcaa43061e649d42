"""Splitting: every input in exactly one part, in order, within the bounds of a part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.control.codec import encode
from common.control.identities import AttemptKey, pack_ids
from common.control.pooling import PoolInput, PoolResult
from router.pooling.work import MAX_PART_INPUTS, MAX_PART_RESULT_BYTES, MAX_PART_TOKENS, PoolWork, split


def work(lengths: list[int], width: int = 4, *, per_token: bool = False) -> PoolWork:
    return PoolWork("m", [PoolInput(pack_ids([1] * length)) for length in lengths], width, per_token=per_token)


@given(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 10_000)), max_size=400),
    st.integers(0, 9),
    st.sampled_from([1, 384, 8192]),
    st.booleans(),
)
def test_every_input_is_in_one_part_and_no_part_is_too_large(
    lengths: list[int], num_nodes: int, width: int, per_token: bool
) -> None:
    wanted = work(lengths, width, per_token=per_token)
    parts = split(wanted, num_nodes)
    assert [index for part in parts for index in part] == list(range(len(lengths)))
    for part in parts:
        assert 1 <= len(part) <= MAX_PART_INPUTS
        if len(part) > 1:
            assert sum(lengths[index] for index in part) <= MAX_PART_TOKENS
            assert sum(wanted.result_bytes(wanted.inputs[index]) for index in part) <= MAX_PART_RESULT_BYTES


def test_work_that_fits_one_part_is_spread_over_the_nodes_only_if_it_is_large_enough() -> None:
    assert len(split(work([100] * 40), 1)) == 1
    assert len(split(work([100] * 40), 2)) == 2
    assert len(split(work([100] * 40), 4)) == 4
    assert len(split(work([10] * 40), 4)) == 1


def test_sizes_are_those_of_all_inputs() -> None:
    wanted = work([3, 5])
    assert (wanted.num_tokens, wanted.longest, wanted.result_bytes(wanted.inputs[1])) == (8, 5, 16)
    assert work([3, 5], per_token=True).result_bytes(wanted.inputs[1]) == 80


@pytest.mark.parametrize(("width", "lengths"), [(384, [43] * 200), (1024, [16] * 200), (1, [16] * 200), (1024, [2032])])
def test_the_vectors_of_every_part_fit_one_message(width: int, lengths: list[int]) -> None:
    """As `encode` refuses what the router would not read."""
    wanted = work(lengths, width, per_token=True)
    for part in split(wanted, 1):
        vectors = [bytes(wanted.result_bytes(wanted.inputs[index])) for index in part]
        assert encode(PoolResult(AttemptKey("embd-" + "0" * 64, 4), vectors))
