"""Stop strings over token boundaries."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopMatcher

small = st.text(alphabet="ab ", max_size=14)
stops = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stop_strings: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stop_strings)
    out = ""
    for part in parts:
        text, stop = matcher.push(part)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.flush(), None


@settings(max_examples=200, deadline=None)
@given(stop_strings=stops, parts=st.lists(small, max_size=8))
def test_result_does_not_depend_on_where_the_text_is_cut(stop_strings: list[str], parts: list[str]) -> None:
    text = "".join(parts)
    assert run(stop_strings, parts) == run(stop_strings, list(text)) == run(stop_strings, [text])


@settings(max_examples=200, deadline=None)
@given(stop_strings=stops, text=small)
def test_output_is_cut_before_the_first_complete_stop_string(stop_strings: list[str], text: str) -> None:
    out, stop = run(stop_strings, list(text))
    if stop is None:
        assert out == text
        assert not any(candidate in text for candidate in stop_strings)
    else:
        assert text.startswith(out + stop)
        shorter = text[: len(out) + len(stop) - 1]
        assert not any(candidate in shorter for candidate in stop_strings)


def test_text_that_may_begin_a_stop_string_is_held_back_and_then_released() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("answer\n") == ("answer", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ually") == ("\n\nUsually", None)


def test_the_stop_string_can_be_included() -> None:
    matcher = StopMatcher(["lo, w"], include_stop=True)
    assert [matcher.push(part) for part in ("hel", "lo", ", world")] == [("he", None), ("l", None), ("lo, w", "lo, w")]
