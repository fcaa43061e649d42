"""What the soak's clients ask for, and what of an answer must not change. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_PROMPTS = ["The capital of France is", "def add(a, b):", "Once upon a time there was " * 12, "One, two, three, " * 60]
_CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "people", "tags"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _CITY}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Request:
    """One call. Equal requests have equal answers."""

    path: str
    body: dict[str, Any]


def requests() -> list[Request]:
    """All kinds: lengths, sampling, samples, penalties, stop strings, log-probabilities, grammars and tools."""
    found: list[Request] = []
    for number, prompt in enumerate(_PROMPTS):
        completions: list[dict[str, Any]] = [
            {"max_tokens": tokens, "ignore_eos": True, **sampling}
            for tokens in (8, 120)
            for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 7})
        ]
        completions += [
            {"max_tokens": 60, "n": 3, "temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
            {"max_tokens": 60, "stop": ["e", "the"], "min_tokens": 10, "logit_bias": {"50": 5}},
            {"max_tokens": 40, "logprobs": 2, "temperature": 1.2, "top_p": 0.8, "top_k": 30},
            {"max_tokens": 60, "structured_outputs": {"regex": "(foo|bar)[0-9]{3,20}( [a-f]+)?"}},
        ]
        found += [Request(COMPLETIONS, {"prompt": prompt, "seed": number, **body}) for body in completions]
        chats: list[dict[str, Any]] = [
            {},
            {"n": 2, "temperature": 0.9},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}}},
            {"tools": [_TOOL], "tool_choice": "required"},
        ]
        messages = [{"role": "user", "content": prompt}]
        found += [Request(CHAT, {"messages": messages, "max_tokens": 80, "seed": number, **body}) for body in chats]
    return found


@dataclass
class Choice:
    """One sample of an answer."""

    text: str = ""
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """The tokens that its log-probabilities name. The values are not compared: in batches of other sizes they are rounded differently."""
    calls: dict[int, str] = field(default_factory=dict)
    """Names and arguments of tool calls, by index."""

    def add(self, choice: dict[str, Any]) -> None:
        """A piece of it, from a stream of either call."""
        delta = choice.get("delta") or {}
        self.text += choice.get("text") or delta.get("content") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.token_ids += choice.get("token_ids") or []
        self.tokens += (choice.get("logprobs") or {}).get("tokens") or []
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            piece = (function.get("name") or "") + (function.get("arguments") or "")
            self.calls[call["index"]] = self.calls.get(call["index"], "") + piece
