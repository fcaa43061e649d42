"""Sessions: each request continues the one before, as people chat and as agents call tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvrelay.load.jobs import LoadJob, fresh_words
from kvrelay.load.plan import LoadPlan

_TOOL_NAME = "look_up"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 40}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}
_CALL_TOKENS = 96
"""Room for a whole call: one that is cut off cannot be continued."""
_NO_WORDS = "Go on."
"""What a user says instead of nothing, which some servers refuse."""


@dataclass(frozen=True)
class ReceivedAnswer:
    """What the server answered: its text, and its tool calls as they are sent back to it."""

    text: str
    calls: Sequence[Mapping[str, Any]] = ()


def first_messages(job: LoadJob) -> list[dict[str, Any]]:
    """The messages of a chat that has no answer yet."""
    system = [{"role": "system", "content": job.system}] if job.system else []
    return [*system, {"role": "user", "content": job.prompt or _NO_WORDS}]


class Conversation:
    """The messages of a session while it runs: `turns` requests, each with all messages so far.

    With `tools` every turn but the last must call a tool, and the next one carries the tool's result: an agent's loop.
    """

    def __init__(self, plan: LoadPlan, first: LoadJob) -> None:
        self._plan = plan
        self._first = first
        self.messages = first_messages(first)
        self.turn = 0

    def fields(self) -> dict[str, Any]:
        """What the body of the current turn's request says besides the model and how to sample."""
        fields: dict[str, Any] = {"messages": self.messages, "max_tokens": self._first.output_tokens}
        if self._plan.tools:
            calls = self.turn < self._plan.turns - 1
            fields |= {"tools": [_TOOL], "tool_choice": "required" if calls else "none"}
            if calls:
                fields["max_tokens"] = max(fields["max_tokens"], _CALL_TOKENS)
        return fields

    def take(self, answer: ReceivedAnswer) -> None:
        """Take the answer of the current turn, and go on to the next."""
        self.turn += 1
        key, length = f"{self._plan.seed} turn {self._first.number} {self.turn}", len(str(self._first.prompt).split())
        words = fresh_words(key, length) or _NO_WORDS
        if not answer.calls:
            self.messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": words}]
            return
        self.messages.append({"role": "assistant", "content": answer.text, "tool_calls": list(answer.calls)})
        for call in answer.calls:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": words})


def read_answer(events: Sequence[Mapping[str, Any]]) -> ReceivedAnswer:
    """The answer that the events of a chat stream add up to; arguments that were cut off become an empty object."""
    text: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices") or ():
            delta: dict[str, Any] = choice.get("delta") or {}
            text.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or ():
                _add(calls, part)
    for call in calls.values():
        try:
            json.loads(call["function"]["arguments"])
        except ValueError:
            call["function"]["arguments"] = "{}"
    return ReceivedAnswer("".join(text), [calls[index] for index in sorted(calls)])


def _add(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    index, function = part.get("index", 0), cast("Mapping[str, Any]", part.get("function") or {})
    call = calls.setdefault(
        index, {"id": f"call-{index}", "type": "function", "function": {"name": _TOOL_NAME, "arguments": ""}}
    )
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""
