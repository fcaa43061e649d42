"""Samples of one prompt: who is placed now and who waits."""

from __future__ import annotations

from collections.abc import Callable

from router.requests.shared_prompt import SharedPrompt


class Samples:
    def __init__(self, count: int) -> None:
        self.prompt = SharedPrompt()
        self.names = [f"r-{index}" for index in range(count)]
        self.placed: list[str] = []

    def place(self, name: str, *, usable: bool = True) -> None:
        if self.prompt.may_place(name, holder_usable=usable, wake=self._again(name)):
            self.placed.append(name)

    def _again(self, name: str) -> Callable[[], None]:
        return lambda: self.place(name)


def test_one_sample_goes_first_and_the_others_follow_to_its_decode_node() -> None:
    samples = Samples(3)
    for name in samples.names:
        samples.place(name)
    assert samples.placed == ["r-0"]
    samples.prompt.held_at("d0")
    samples.prompt.held_at("d1")
    assert samples.placed == ["r-0", "r-1", "r-2"]
    assert samples.prompt.holder == "d0"


def test_the_first_sample_keeps_its_place_through_its_own_retries() -> None:
    samples = Samples(2)
    for name in samples.names:
        samples.place(name)
    samples.place("r-0", usable=False)
    assert samples.placed == ["r-0", "r-0"]


def test_when_the_first_ends_without_a_holder_the_next_goes_first() -> None:
    samples = Samples(3)
    for name in samples.names:
        samples.place(name)
    samples.prompt.leave("r-0")
    assert samples.placed == ["r-0", "r-1"]
    samples.prompt.leave("r-2")
    samples.prompt.leave("r-1")
    assert samples.placed == ["r-0", "r-1"]


def test_when_a_sample_ends_the_request_no_other_is_placed_any_more() -> None:
    samples = Samples(3)
    for name in samples.names[:2]:
        samples.place(name)
    samples.prompt.leave("r-0", ends_request=True)
    samples.place("r-2")
    samples.prompt.leave("r-1", ends_request=True)
    samples.prompt.held_at("d0")
    assert samples.placed == ["r-0"]


def test_after_the_holder_is_lost_one_sample_goes_first_again() -> None:
    samples = Samples(3)
    for name in samples.names:
        samples.place(name)
    samples.prompt.held_at("d0")
    samples.placed.clear()
    samples.place("r-2", usable=False)
    samples.place("r-0", usable=False)
    samples.place("r-1", usable=False)
    assert samples.placed == ["r-2"]
    samples.prompt.held_at("d1")
    assert samples.placed == ["r-2", "r-0", "r-1"]
