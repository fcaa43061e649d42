"""The token sequences of bad words."""

from __future__ import annotations

import pytest

from router.http.openai.sampling_params import bad_word_ids

IDS = {
    "fox": [5],
    " fox": [6],
    "red fox": [7, 5],
    " red fox": [8, 5],
    "x": [1],
    " x": [2, 1],
    "same": [3],
    " same": [3],
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fox"], [[5], [6]]),
        (["  fox"], [[5], [6]]),
        (["red fox"], [[7, 5], [8, 5]]),
        (["x"], [[1]]),  # the space is a token of its own
        (["same"], [[3]]),
        (["fox", "x"], [[5], [6], [1]]),
        (["  "], []),
    ],
    ids=str,
)
def test_a_word_is_written_at_the_start_or_after_a_space(words: list[str], expected: list[list[int]]) -> None:
    assert bad_word_ids(words, lambda text: IDS.get(text, [])) == expected
