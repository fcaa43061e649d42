"""Experts move among four real ranks while rows of skewed routing pass: answers stay, the load evens out, no byte is added."""

from __future__ import annotations

from typing import Any

import pytest
from support.expert_jobs import EXPERTS
from support.rank_processes import Case, run_ranks

RANKS, REDUNDANT = 4, 8


def ranks(model: str, **arguments: Any) -> list[Any]:
    usual = {"model": model, "redundant": REDUNDANT, "native": True, "bits": None, "same_host": True}
    return run_ranks("support.expert_jobs:rebalance", [Case(RANKS, 1, {**usual, **arguments})])[0]


@pytest.mark.parametrize(
    ("native", "bits", "same_host", "minutes"),
    [
        (True, None, True, 10),
        (False, "int8", False, 1),
        pytest.param(False, None, True, 1, marks=pytest.mark.thorough),
        pytest.param(True, "int8", False, 1, marks=pytest.mark.thorough),
        pytest.param(True, "int4", True, 1, marks=pytest.mark.thorough),
    ],
)
def test_answers_stay_and_the_load_evens_out(
    model: str, native: bool, bits: str | None, same_host: bool, minutes: int
) -> None:
    found = ranks(model, native=native, bits=bits, same_host=same_host, minutes=minutes)
    assert [outcome.message for outcome in found] == [""] * RANKS
    values = [outcome.value for outcome in found]
    for each in values:
        assert each["error"] < 1e-5, "a row before, during or after the move has another answer"
        assert each["slots"] == values[0]["slots"]
    first = values[0]
    assert first["before"] > 1.5
    assert first["after"] <= 1.1
    (_, moved), *later = first["moved"]
    assert 0 < moved <= EXPERTS
    assert len(later) == 0, "steady load moves nothing again"
    assert len({tuple(each["share"]) for each in values}) == 1
    assert first["share"][1] == (EXPERTS + REDUNDANT) // RANKS


def test_a_rank_that_dies_in_a_move_is_named_and_nobody_hangs(model: str) -> None:
    found = ranks(model, lost=2, minutes=1)
    assert found[2].signal == 9
    for rank in (0, 1, 3):
        assert "rank 2 has ended" in found[rank].value["lost"]
        assert found[rank].seconds < 20
