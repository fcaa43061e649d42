"""The search for the highest rate: finds a capacity wherever it is, and ends."""

from __future__ import annotations

import pytest

from kvrelay.load.search import RateSearch


def search_for(capacity: float, first: float = 1.0, precision: float = 0.1) -> tuple[RateSearch, list[float]]:
    search, tried = RateSearch(first, precision, lowest=0.01, highest=1000.0), []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        assert len(tried) < 40
        search.record(met=rate <= capacity)
    return search, tried


@pytest.mark.parametrize("capacity", [0.013, 0.3, 1.0, 7.3, 64.0, 999.0])
@pytest.mark.parametrize("first", [0.5, 3.0, 200.0])
def test_the_capacity_is_found_to_the_wanted_precision(capacity: float, first: float) -> None:
    search, tried = search_for(capacity, first)
    assert search.best <= capacity < search.worst
    assert search.worst <= search.best * 1.1
    assert len(set(tried)) == len(tried)


def test_the_search_stays_within_its_bounds() -> None:
    fast, _ = search_for(1e9)
    assert (fast.best, fast.next_rate) == (1000.0, None)
    assert RateSearch(8.0, 0.1, lowest=0.01, highest=2.0).next_rate == 2.0
    dead, tried = search_for(0.0)
    assert dead.best == 0.0
    assert min(tried) == 0.01


def test_a_miss_below_a_rate_that_was_met_ends_the_search() -> None:
    search = RateSearch(1.0, 0.1, lowest=0.01, highest=100.0)
    for met in (True, True, False, False):  # 1, 2, 4, then between 2 and 4
        search.record(met=met)
    assert search.best == 2.0
    assert search.next_rate is not None
    assert 2.0 < search.next_rate < search.worst


@pytest.mark.parametrize("capacity", [0.013, 0.3, 1.0, 7.3, 64.0, 999.0, 1e9])
@pytest.mark.parametrize("first", [0.5, 3.0, 200.0])
def test_the_rates_left_are_between_what_was_said_all_the_way(capacity: float, first: float) -> None:
    _, tried = search_for(capacity, first)
    search = RateSearch(first, 0.1, lowest=0.01, highest=1000.0)
    for number, rate in enumerate(tried):
        least, most = search.left()
        assert least <= len(tried) - number <= most, (rate, least, most)
        search.record(met=rate <= capacity)
    assert search.left() == (0, 0)
