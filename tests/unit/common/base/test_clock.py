"""Periodic work begins at multiples of its period."""

from __future__ import annotations

import pytest

from common.base.clock import until_next


@pytest.mark.parametrize(("now_s", "left_s"), [(10.0, 0.5), (10.1, 0.4), (10.49, 0.01), (10.499, 0.501), (0.0, 0.5)])
def test_the_next_moment_is_a_multiple_of_the_period_and_not_now(now_s: float, left_s: float) -> None:
    assert until_next(0.5, now_s) == pytest.approx(left_s)


def test_a_longer_period_ends_together_with_a_shorter_one() -> None:
    assert 3.2 + until_next(1.0, 3.2) == pytest.approx(3.8 + until_next(0.25, 3.8))
