"""Numbers of things in messages."""

import pytest

from common.base.sentences import counted


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (0, "node", "0 nodes"),
        (1, "node", "1 node"),
        (2, "cached block", "2 cached blocks"),
        (1, "request is/requests are", "1 request is"),
        (3, "request is/requests are", "3 requests are"),
    ],
)
def test_one_thing_has_a_singular(count: int, noun: str, expected: str) -> None:
    assert counted(count, noun) == expected
