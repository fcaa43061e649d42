"""Data-parallel ranks send rows to the ranks of their experts: each gets the sum that one rank with all experts computes."""

from __future__ import annotations

import pytest
from support.expert_jobs import EXPERTS
from support.rank_processes import Case, run_ranks

RANKS = 4
UNEVEN = [[3, 0, 1, 40], [0, 0, 7, 0], [1, 1, 1, 1], [0, 1, 0, 0], [200, 5, 0, 64]]
"""Rows of each rank in each step."""


@pytest.mark.parametrize(
    ("native", "same_host", "ranks"), [(True, True, RANKS), (False, False, RANKS), (True, True, 3)]
)
def test_rows_of_each_rank_get_the_sum_of_all_their_experts(
    model: str, native: bool, same_host: bool, ranks: int
) -> None:
    arguments = {"model": model, "redundant": None, "native": native, "same_host": same_host, "rows": UNEVEN}
    (found,) = run_ranks("support.expert_jobs:dispatch", [Case(ranks, 1, arguments, is_data_parallel=True)])
    assert [outcome.message for outcome in found] == [""] * ranks
    assert all(outcome.value["error"] < 1e-5 for outcome in found)


@pytest.mark.parametrize("native", [True, False])
def test_rows_find_experts_that_have_moved_and_their_replicas(model: str, native: bool) -> None:
    """The map from experts to slots is the sender's, and all ranks count the rows of all: else they would plan apart."""
    redundant = 8
    rows = [UNEVEN[-1], [50, 60, 0, 70], *UNEVEN] * 12
    arguments = {"model": model, "redundant": redundant, "native": native, "same_host": True, "rows": rows}
    (found,) = run_ranks("support.expert_jobs:dispatch", [Case(RANKS, 1, arguments, is_data_parallel=True)])
    assert [outcome.message for outcome in found] == [""] * RANKS
    values = [outcome.value for outcome in found]
    for each in values:
        assert each["error"] < 1e-5
        assert each["moved"] > 0
        assert (each["counts"], each["slots"]) == (values[0]["counts"], values[0]["slots"])
        assert each["held"] == (EXPERTS + redundant) // RANKS
        assert each["bytes"] == each["held"] * 3 * 64 * 32 * 4, "a rank holds its share of the experts, in float32"
