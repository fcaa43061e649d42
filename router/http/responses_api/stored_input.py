"""The input of a stored response as items, in pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from common.base.errors import BadRequest
from router.http.json_body import Json
from router.http.openai.checks import shorten
from router.http.response_store import StoredResponse
from router.http.responses_api.input_items import InputItem, chat_messages
from router.http.responses_api.item_references import item_id

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100


def answer_messages(response: Json) -> list[Json]:
    """The chat messages that a response's output means."""
    return chat_messages(_ITEMS.validate_python(response["output"]))


def item_page(stored: StoredResponse, query: Mapping[str, str]) -> Json:
    """The items from the first turn on, or some of them: `order` (newest first unless it is `asc`), `after` an item, `limit`.

    Raises: BadRequest.
    """
    limit, order, after = query.get("limit", str(_DEFAULT_LIMIT)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LIMIT):
        raise BadRequest(f"limit must be 1 to {_MAX_LIMIT}, not {shorten(limit)}", param="limit")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be 'asc' or 'desc', not {shorten(order)}", param="order")
    items = _input_items(stored)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest(f"after: the input has no item {shorten(after)}", param="after")
        start = places[0] + 1
    page = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }


def _input_items(stored: StoredResponse) -> list[Json]:
    """The input items of all turns, oldest first. Their ids are valid in this list only: a request cannot refer to them."""
    response_id = stored.response["id"]
    asked = stored.messages[: len(stored.messages) - len(answer_messages(stored.response))]
    found = [item for message in asked for item in _items_of(message)]
    return [{"id": item_id(item["type"], response_id, f"i{place}"), **item} for place, item in enumerate(found)]


def _items_of(message: Json) -> Iterator[Json]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        about = {"call_id": message["tool_call_id"], "status": "completed"}
        yield {"type": "function_call_output", **about, "output": content}
        return
    if message.get("reasoning_content") is not None:
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "summary": [], "content": [thought]}
    if content is not None:
        part: Json = {"type": "input_text", "text": content}
        if role == "assistant":
            part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        yield {"type": "message", "status": "completed", "role": role, "content": [part]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "status": "completed", "call_id": call["id"], **call["function"]}
