"""Conversations that a chat template does not take as they are."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.base.errors import BadRequest
from router.text.chat_template import ChatTemplate

# As Qwen 3.5's: a system message is allowed at the very beginning only.
SYSTEM_FIRST = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '<|' + m.role + '|>' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '[' + call.function.name + ']' }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As Mistral's: an optional system message, then users and assistants in turn.
ALTERNATING = """
{%- if messages[0].role == 'system' %}{{ '<|system|>' + messages[0].content }}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|' + m.role + '|>' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As Gemma's first: no system message at all.
NO_SYSTEM = ALTERNATING.replace(
    "{{ '<|system|>' + messages[0].content }}", "{{ raise_exception('System role not supported') }}"
)
# Shows the first system message and silently drops every other one, as several do.
DROPPING = """
{%- set shown = namespace(system=false) %}
{%- for m in messages %}
{%- if m.role != 'system' or not shown.system %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}
{%- if m.role == 'system' %}{% set shown.system = true %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
ANY = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|assistant|>"


def conversation(roles: str) -> list[dict[str, Any]]:
    """One message for each letter of `roles`."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"{letter}{number}"} for number, letter in enumerate(roles, 1)]


def rendered(source: str, messages: list[dict[str, Any]], *, prompt: bool = True) -> str:
    template = ChatTemplate(source, {})
    fitted = template.conversations.fit(messages)
    return template.render(fitted.messages, add_generation_prompt=prompt)


def carried(text: str) -> str:
    return f"<system>\n{text}\n</system>"


@pytest.mark.parametrize(
    "source", [SYSTEM_FIRST, ALTERNATING, NO_SYSTEM, DROPPING], ids=["first", "turns", "none", "drop"]
)
@pytest.mark.parametrize(
    "roles",
    [
        "ssu",
        "sdu",
        "dsu",
        "usu",
        "us",
        "s",
        "ss",
        "uaus",
        "suasu",
        "suas",
        "uu",
        "uuau",
        "uaau",
        "au",
        "sau",
        "uasau",
        "sssuusaau",
    ],
)
def test_every_text_of_any_sequence_of_roles_is_in_the_prompt_in_its_order(source: str, roles: str) -> None:
    text = rendered(source, conversation(roles))
    places = [text.find(f"{letter}{number}") for number, letter in enumerate(roles, 1)]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("source", "roles", "expected", "changes"),
    [
        (SYSTEM_FIRST, "ssu", "<|system|>s1\n\ns2<|user|>u3", ["leading system messages joined"]),
        (
            SYSTEM_FIRST,
            "usu",
            f"<|user|>u1<|user|>{carried('s2')}\n\nu3",
            ["later system messages carried into the user's turns"],
        ),
        (SYSTEM_FIRST, "us", f"<|user|>u1\n\n{carried('s2')}", ["later system messages carried into the user's turns"]),
        (ALTERNATING, "uu", "<|user|>u1\n\nu2", ["neighbouring user messages merged"]),
        (
            ALTERNATING,
            "au",
            "<|user|><|assistant|>a1<|user|>u2",
            ["an empty turn of the user put before the assistant's first"],
        ),
        (NO_SYSTEM, "su", f"<|user|>{carried('s1')}\n\nu2", ["system messages carried into the user's turns"]),
        (
            ANY,
            "ssusuaau",
            "<|system|>s1<|system|>s2<|user|>u3<|system|>s4<|user|>u5<|assistant|>a6<|assistant|>a7<|user|>u8",
            [],
        ),
        (SYSTEM_FIRST, "suau", "<|system|>s1<|user|>u2<|assistant|>a3<|user|>u4", []),
    ],
)
def test_only_what_the_template_does_not_take_is_changed(
    source: str, roles: str, expected: str, changes: list[str]
) -> None:
    template = ChatTemplate(source, {})
    fitted = template.conversations.fit(conversation(roles))
    assert list(fitted.changes) == changes
    assert template.render(fitted.messages) == f"{expected}<|assistant|>"


@pytest.mark.parametrize("source", [SYSTEM_FIRST, ALTERNATING, NO_SYSTEM, DROPPING, ANY])
@pytest.mark.parametrize(
    "turns",
    [
        ["su", "a", "su", "a", "uu", "a", "u"],
        ["u", "a", "su", "a", "su"],
        ["us", "a", "u"],
        ["ssu", "a", "us", "a", "sus"],
    ],
)
def test_earlier_turns_stay_as_they_were_while_a_conversation_grows(source: str, turns: list[str]) -> None:
    so_far, before = "", ""
    for turn in turns:
        so_far += turn
        if turn == "a":
            continue
        text = rendered(source, conversation(so_far))
        assert text.startswith(before)
        before = text


def test_calls_are_a_turn_of_their_own_and_reasoning_is_joined() -> None:
    """Templates whose roles alternate take a text of the assistant beside its calls, and show of one message only the calls."""
    source = SYSTEM_FIRST.replace("{%- for m in messages %}", ALTERNATING_CHECK).replace(
        "m.content }}", "(m.reasoning or '') + m.content }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "plan", "reasoning": "r1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert ChatTemplate(source, {}).conversations.fit(messages).messages == messages
    messages = [
        *messages[:2],
        {"role": "assistant", "content": "b", "reasoning": "r2"},
        {"role": "user", "content": "v"},
    ]
    assert rendered(source, messages) == "<|user|>u<|assistant|>r1\n\nr2plan\n\nb<|user|>v<|assistant|>"


def test_a_template_that_moves_system_messages_to_the_front_gets_them_as_they_are() -> None:
    source = """{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
    {%- for m in messages if m.role != 'system' %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|assistant|>"""
    assert rendered(source, conversation("usu")) == "s2<|user|>u1<|user|>u3<|assistant|>"


ALTERNATING_CHECK = """{%- for m in messages %}
{%- if loop.previtem is defined and loop.previtem.role == m.role %}{{ raise_exception('alternate') }}{% endif %}"""


def test_what_a_template_refuses_for_another_reason_stays_refused() -> None:
    source = "{{ raise_exception('no') }}"
    with pytest.raises(BadRequest, match="no"):
        rendered(source, conversation("ssu"))


@pytest.mark.parametrize("roles", ["u" * 4096, "us" * 2048, "s" * 4096, "ua" * 2048])
def test_a_long_conversation_costs_little(roles: str) -> None:
    template = ChatTemplate(ALTERNATING, {})
    messages = [{**message, "content": "x" * 1000} for message in conversation(roles)]
    template.conversations.fit(messages)
    started_s = time.process_time()
    template.conversations.fit(messages)
    assert time.process_time() - started_s < 0.5


def test_a_template_that_iterates_arguments_takes_a_call_whose_arguments_are_no_object() -> None:
    source = """{%- for m in messages %}{{ m.content }}{%- for call in m.tool_calls or [] %}
    {%- for name, value in call.function.arguments.items() %}{{ name + '=' + value|string }}{% endfor %}
    {%- endfor %}{% endfor %}"""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, '{"cut')]
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert ChatTemplate(source, {}).render(messages) == 'ua=1arguments={"cut'
