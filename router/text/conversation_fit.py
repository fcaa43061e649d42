"""Fits conversations to a chat template that takes fewer of them than clients send. Pure.

Many templates take a system message at the very beginning only, or users' and assistants' turns only in alternation. A
client cannot change that: agents send system messages between turns, applications several messages of one user. What a
template takes is seen by rendering small conversations of each such shape, once: a template that drops a message without an
error counts as one that refuses it.

Every change depends on neighbouring messages alone, so that earlier turns are rendered as before when a conversation grows,
and prefix hits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from common.base.errors import BadRequest

Message = Mapping[str, Any]
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What templates call a message's reasoning."""
_SYSTEM = ("system", "developer")
ROLES = frozenset({*_SYSTEM, "user", "assistant", "tool"})
"""OpenAI's."""
_MAX_ROLES = 256
"""Further roles that clients invent are refused."""
_SHAPES = {
    "system": ["system user"],
    "systems": ["system system user"],
    "late system": ["system user assistant system user", "user assistant system user"],
    "assistant first": ["assistant user"],
    "users": ["user user"],
    "assistants": ["user assistant assistant user"],
}
"""Roles of small conversations, by what is unusual about them."""


class FittedMessages(NamedTuple):
    """The messages to render, and what was changed, in words."""

    messages: Sequence[Message]
    changes: tuple[str, ...] = ()


class ConversationFit:
    """What one template takes. `render` renders messages, and raises BadRequest if the template refuses them. Any thread."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._taken: dict[str, bool] = {}
        self._roles: dict[str, bool] = {}

    def fit(self, messages: Sequence[Message]) -> FittedMessages:
        """The messages in the nearest form that the template takes; unchanged where it takes them as they are."""
        kinds = _kinds(messages)
        if not kinds or all(map(self._takes, kinds)):
            return FittedMessages(messages)
        changes: list[str] = []
        fitted = list(messages)
        if "systems" in kinds and not self._takes("systems"):
            fitted = _join(fitted, _leading_systems(fitted))
            changes.append("leading system messages joined")
        if not self._takes("system"):
            fitted, changed = _carry(fitted, 0)
            changes += ["system messages carried into the user's turns"] if changed else []
        elif not self._takes("late system"):
            fitted, changed = _carry(fitted, _leading_systems(fitted))
            changes += ["later system messages carried into the user's turns"] if changed else []
        if fitted and _first_turn(fitted) == "assistant" and not self._takes("assistant first"):
            fitted.insert(_leading_systems(fitted), {"role": "user", "content": ""})
            changes.append("an empty turn of the user put before the assistant's first")
        for role in ("user", "assistant"):
            if not self._takes(f"{role}s"):
                merged = _merge(fitted, role)
                changes += [f"neighbouring {role} messages merged"] if len(merged) < len(fitted) else []
                fitted = merged
        return FittedMessages(fitted, tuple(changes))

    def takes_role(self, role: str) -> bool:
        """The template shows messages of this role, which is none of OpenAI's, somewhere in a conversation."""
        if role not in self._roles and len(self._roles) < _MAX_ROLES:
            self._roles[role] = any(self._shows(roles.split()) for roles in (f"{role} user", f"user {role}"))
        return self._roles.get(role, False)

    def _takes(self, shape: str) -> bool:
        """The template shows every message of small conversations of this shape, in whatever order."""
        if shape not in self._taken:
            self._taken[shape] = all(self._shows(roles.split()) for roles in _SHAPES[shape])
        return self._taken[shape]

    def _shows(self, roles: list[str]) -> bool:
        messages = [{"role": role, "content": f"message-{at}-of-{role}"} for at, role in enumerate(roles)]
        try:
            shown = self._render(messages)
        except BadRequest:
            return False
        return all(message["content"] in shown for message in messages)


def _kinds(messages: Sequence[Message]) -> set[str]:
    """The shapes that these messages have and that some templates refuse."""
    found: set[str] = set()
    last, in_head = "", True
    for message in messages:
        role = _turn_of(message)
        if role == "system":
            found.add(("systems" if last else "system") if in_head else "late system")
        else:
            if in_head and role in ("assistant", "calls"):
                found.add("assistant first")
            in_head = False
            if role == last and role in ("user", "assistant"):
                found.add(f"{role}s")
        last = role
    return found


def _turn_of(message: Message) -> str:
    """The role. Calls are a turn of their own: templates take them beside another message of the assistant."""
    role = str(message.get("role"))
    if role == "assistant" and message.get("tool_calls"):
        return "calls"
    return "system" if role in _SYSTEM else role


def _leading_systems(messages: Sequence[Message]) -> int:
    return next((at for at, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages))


def _first_turn(messages: Sequence[Message]) -> object:
    at = _leading_systems(messages)
    return messages[at].get("role") if at < len(messages) else None


def _text(message: Message) -> str:
    return str(message.get("content") or "")


def _join(messages: list[Message], count: int) -> list[Message]:
    """The first `count` messages as one."""
    return [{**messages[0], "content": "\n\n".join(map(_text, messages[:count]))}, *messages[count:]]


def _carry(messages: list[Message], start: int) -> tuple[list[Message], bool]:
    """From `start` on, move system messages, marked, into the user's turn that follows at once; else into the one before at
    once; else they become a turn of the user. Returns whether there were any."""
    fitted, waiting = messages[:start], list[str]()
    for message in messages[start:]:
        if message.get("role") in _SYSTEM:
            waiting.append(f"<system>\n{_text(message)}\n</system>")
            continue
        if waiting and message.get("role") == "user":
            message = {**message, "content": "\n\n".join([*waiting, _text(message)])}
        elif waiting:
            _attach(fitted, start, waiting)
        waiting = []
        fitted.append(message)
    if waiting:
        _attach(fitted, start, waiting)
    return fitted, any(message.get("role") in _SYSTEM for message in messages[start:])


def _attach(fitted: list[Message], start: int, texts: list[str]) -> None:
    """Put texts behind the last turn, if it is the user's, else into a new one."""
    if len(fitted) > start and fitted[-1].get("role") == "user":
        fitted[-1] = {**fitted[-1], "content": "\n\n".join([_text(fitted[-1]), *texts])}
    else:
        fitted.append({"role": "user", "content": "\n\n".join(texts)})


def _merge(messages: Sequence[Message], role: str) -> list[Message]:
    """Neighbouring messages of `role` as one."""
    fitted: list[Message] = []
    for of_role, neighbours in groupby(messages, lambda message: _turn_of(message) == role):
        turn = list(neighbours)
        fitted += [_merged(turn)] if of_role and len(turn) > 1 else turn
    return fitted


def _merged(turn: Sequence[Message]) -> Message:
    """Texts are joined at once: one by one, those of a body of 4 MB would take seconds."""
    merged: dict[str, Any] = {}
    for message in turn:
        merged |= message
    for name in ("content", *REASONING_NAMES):
        if name in merged:
            merged[name] = "\n\n".join(str(text) for message in turn if (text := message.get(name)))
    if len({message.get("name") for message in turn}) > 1:
        merged.pop("name", None)
    return merged
