"""Ids of items, and references by them to items of stored answers, which some clients send in place of the items. Runs on the
router's event loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from common.base.errors import BadRequest, NotFound, PayloadTooLarge
from router.http.json_body import to_json
from router.http.openai.checks import shorten
from router.http.response_store import ResponseStore
from router.http.responses_api.input_items import InputItem, ItemReference

_MAX_RESPONSES = 256
"""Stored responses that one request may refer to."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{24})(\d{1,4})")
"""The `item_id` of an item of a response's output, by its place there."""
_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


def item_id(kind: str, response_id: str, place: int | str) -> str:
    """The id of an item of this type at this place of the response."""
    return f"{_PREFIXES[kind]}_{response_id.rpartition('_')[2]}{place}"


async def looked_up(
    items: Sequence[InputItem], store: ResponseStore, tenant: str, max_bytes: int
) -> tuple[list[InputItem], int]:
    """The items with references replaced by the items that they name, and the bytes of those.

    Raises: NotFound, also for an item of another tenant; BadRequest or PayloadTooLarge for too many; Unavailable.
    """
    outputs: dict[str, list[Any]] = {}
    found: list[InputItem] = []
    size_bytes = 0
    for item in items:
        if not isinstance(item, ItemReference):
            found.append(item)
            continue
        named = _ID.fullmatch(item.id)
        if named is None:
            raise _unknown(item.id)
        response_id, place = f"resp_{named[1]}", int(named[2])
        if response_id not in outputs:
            if len(outputs) == _MAX_RESPONSES:
                raise BadRequest(f"input refers to more than {_MAX_RESPONSES} responses", param="input")
            try:
                outputs[response_id] = (await store.get(tenant, response_id)).response["output"]
            except NotFound:
                raise _unknown(item.id) from None
        output = outputs[response_id]
        if place >= len(output) or output[place]["id"] != item.id:
            raise _unknown(item.id)
        size_bytes += len(to_json(output[place]))
        if size_bytes > max_bytes:
            raise PayloadTooLarge(f"the items that input refers to are larger than {max_bytes} bytes", param="input")
        found.append(_ITEM.validate_python(output[place]))
    return found, size_bytes


def _unknown(item_id: str) -> NotFound:
    return NotFound(
        f"there is no stored item {shorten(item_id)}: its response was never stored, has expired or belongs to another key; "
        "send the item itself",
        param="input",
        code="item_not_found",
    )
