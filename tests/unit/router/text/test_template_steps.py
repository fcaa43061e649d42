"""A chat template that never ends, or fills the memory, ends with an error; every other one renders as before."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from common.base.errors import BadRequest
from router.text.chat_template import ChatTemplate

HOSTILE = {
    "loops in loops": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% set r = [1, 2] %}{% for a in r recursive %}{{ loop(r) }}{{ loop(r) }}{% endfor %}",
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a long text": "{{ 'a' * 10000000000 }}",
    "a long list": "{{ (10000000000 * [1]) | length }}",
    "a high power": "{{ 10 ** 1000000000 }}",
    "a text that doubles": "{% set ns = namespace(t='ab') %}{% for a in range(99) %}{% set ns.t = ns.t * 2 %}{% endfor %}",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_is_bounded(name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}" + HOSTILE[name], {})
    with pytest.raises(BadRequest, match="the chat template refused the messages"):
        template.render([{"role": "user", "content": "Hello"}])


def test_long_conversations_are_within_the_bound() -> None:
    source = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{{ '-' * 3 }}{{ 2 ** 3 }}{% endfor %}"
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "abc"}] * 50_000)
    assert text == "abc---8" * 50_000


@pytest.mark.parametrize("end", ["", "{{ raise_exception('no') }}"])
def test_a_conversation_is_freed_with_its_rendering(end: str) -> None:
    """A template with macros kept each conversation, of megabytes, until the garbage collector came."""

    class Message(dict[str, str]):
        pass

    template = ChatTemplate(
        "{% macro f(m) %}{{ m.content }}{% endmacro %}{% set x = messages %}{{ f(x[0]) }}" + end, {}
    )
    gc.collect()
    gc.disable()
    try:
        message = Message(role="user", content="Hello")
        left = weakref.ref(message)
        with contextlib.suppress(BadRequest):
            template.render([message])
        del message
        assert left() is None
    finally:
        gc.enable()
