"""Parts of earlier turns that a text model cannot see, such as images: they are named in their place. Pure.

A client cannot take back what another model has seen: the history of a conversation, and what tools have returned. In the
user's last turn such parts are refused, because an answer would pretend to have seen them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from router.http.json_body import Json
from router.http.openai.checks import as_object, items, shorten, type_of


class PartKinds(NamedTuple):
    """What a call's parts are. `text_type`: the `type` of a part of text; `seen`: the kinds that have text, or are handled
    elsewhere."""

    text_type: str
    seen: Collection[str | None]


def named(kind: str | None) -> str:
    """The text in place of a part of this kind."""
    return f"[{shorten(kind)[1:-1]}, which this model cannot see]"


def with_named_parts(turns: Any, kinds: PartKinds) -> Any:
    """The turns of a conversation, with the parts that cannot be seen named in their place; what is no list stays as it is."""
    found = {index: key for index, key, _ in _unseen(turns, kinds)}
    if not found:
        return turns
    return [_with_names(turn, found[at], kinds) if at in found else turn for at, turn in enumerate(turns)]


def unseen_parts(turns: Any, kinds: PartKinds) -> list[str]:
    """The kinds of parts that `with_named_parts` replaces, each once."""
    return list(dict.fromkeys(kind for _, _, unseen in _unseen(turns, kinds) for kind in unseen))


def _unseen(turns: Any, kinds: PartKinds) -> Iterator[tuple[int, str, list[str]]]:
    """Each turn that has such parts: its index, the field that they are in, and their kinds."""
    listed = items(turns) or []
    past = max((at for at, turn in enumerate(listed) if _is_of_model(turn)), default=-1)
    for at, turn in enumerate(listed):
        fields = as_object(turn) or {}
        is_result = fields.get("role") == "tool" or fields.get("type") == "function_call_output"
        key = "output" if fields.get("type") == "function_call_output" else "content"
        parts = items(fields.get(key))
        if parts and (at < past or is_result):
            found = [kind for part in parts if (kind := _unseen_kind(part, kinds)) is not None]
            if found:
                yield at, key, found


def _is_of_model(turn: Any) -> bool:
    fields = as_object(turn) or {}
    return fields.get("role") == "assistant" or fields.get("type") in ("function_call", "custom_tool_call")


def _unseen_kind(part: Any, kinds: PartKinds) -> str | None:
    kind = type_of(part)
    return None if kind in kinds.seen else kind


def _with_names(turn: Json, key: str, kinds: PartKinds) -> Json:
    def shown(part: Any) -> Any:
        kind = _unseen_kind(part, kinds)
        return part if kind is None else {"type": kinds.text_type, "text": named(kind)}

    return {**turn, key: list(map(shown, turn[key]))}
