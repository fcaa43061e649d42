"""Prompts that end within the last message."""

from __future__ import annotations

import pytest

from common.base.errors import BadRequest
from router.text.chat_template import ChatTemplate, before_mark, with_mark

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
STRIPPING = PLAIN.replace("m.content", "m.content | trim")


def prompt(source: str, *texts: str) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    return before_mark(ChatTemplate(source, {}).render(with_mark(messages)))


@pytest.mark.parametrize(
    ("source", "last", "expected"),
    [
        (PLAIN, "once upon", "once upon"),
        (PLAIN, "once upon ", "once upon "),
        (PLAIN, " once", " once"),
        (PLAIN, "", ""),
        (STRIPPING, "once upon ", "once upon"),
        (STRIPPING, " once", "once"),
    ],
)
def test_the_prompt_ends_with_the_last_message_as_the_template_shows_it(source: str, last: str, expected: str) -> None:
    assert prompt(source, last, last) == f"<user>{last.strip() if source == STRIPPING else last}</s><user>{expected}"


def test_a_last_message_that_cannot_be_continued_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not show"):
        prompt("{% for m in messages %}{{ m.role }}{% endfor %}", "a")
    with pytest.raises(BadRequest, match="needs a last message with text"):
        with_mark([{"role": "assistant", "tool_calls": []}])
