"""What becomes of an event that a state machine's table does not have."""

from __future__ import annotations

import pytest

from common.base.errors import InvalidTransition
from common.base.transitions import unlisted, unlisted_counts
from common.base.variables import STRICT_STATES


def test_in_tests_it_raises_with_the_story() -> None:
    with pytest.raises(
        InvalidTransition, match=r"sequence r#1: a -> b is not in its table\. Its story: new; a \(why\)"
    ):
        unlisted("sequence", "a -> b", "r#1", ["new", "a (why)"])


def test_in_production_it_is_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(STRICT_STATES)
    monkeypatch.setattr("common.base.transitions.unlisted_counts", counts := unlisted_counts.copy())
    unlisted("sequence", "a -> b", "r#1", ["new"])
    unlisted("sequence", "a -> b", "r#2", ["new"])
    assert counts["sequence: a -> b"] == 2
    assert "r#2" in caplog.text
