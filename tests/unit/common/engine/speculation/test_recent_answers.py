"""Recent answers: what is found in them, whose they are, and that they stay bounded."""

from __future__ import annotations

import timeit

from common.engine.speculation.recent_answers import RecentAnswers

ANSWER = list(range(10, 30))


def test_the_longest_match_of_the_newest_answers_wins_if_it_is_long_enough() -> None:
    answers = RecentAnswers(1000, 32)
    answers.add("x", ANSWER)
    answers.add("x", [98, 13, 14, 50, 51])
    assert answers.find("x", [1, 13, 14], 3, above=1).token_ids == [50, 51]
    found = answers.find("x", [11, 12, 13, 14], 3, above=1)
    assert (found.token_ids, found.match) == ([15, 16, 17], 4)
    assert answers.find("x", [11, 12, 13, 14], 3, above=4).token_ids == []
    assert answers.find("x", [14], 3, above=1).token_ids == []
    assert answers.find("x", ANSWER, 3, above=1).token_ids == [], "nothing follows the end of an answer"


def test_no_tenant_is_given_what_another_one_was_told() -> None:
    answers = RecentAnswers(1000, 32)
    answers.add("x", ANSWER)
    assert answers.find("y", ANSWER[:4], 3, above=0).token_ids == []


def test_a_tenant_keeps_its_newest_answers_and_all_tenants_together_stay_within_the_bound() -> None:
    answers = RecentAnswers(400, 32)
    for first in range(0, 10_000, 100):
        answers.add("x", list(range(first, first + 40)))
        assert len(answers) <= 100 + 2
    assert answers.find("x", [9900, 9901], 1, above=1).token_ids == [9902]
    assert answers.find("x", [0, 1], 1, above=1).token_ids == []
    for name in range(50):
        answers.add(str(name), ANSWER)
        assert len(answers) <= 400
    assert answers.find("x", [9900, 9901], 1, above=1).token_ids == [], "the tenant that was idle longest leaves first"
    assert answers.find("49", ANSWER[:2], 1, above=1).token_ids == [12]


def test_of_an_answer_that_is_too_long_the_end_is_kept() -> None:
    answers = RecentAnswers(400, 32)
    answers.add("x", list(range(1000)))
    assert answers.find("x", [990, 991], 1, above=1).token_ids == [992]
    assert len(answers) <= 100 + 2


def test_many_tenants_make_a_step_no_slower() -> None:
    """The size is asked for each draft of each step."""

    def seconds(tenants: int) -> float:
        answers = RecentAnswers(100_000, 32)
        for name in range(tenants):
            answers.add(str(name), ANSWER)
        assert len(answers) == tenants * (1 + len(ANSWER))
        return min(timeit.repeat(lambda: len(answers), number=100, repeat=5))

    assert seconds(2000) < 20 * seconds(2)
