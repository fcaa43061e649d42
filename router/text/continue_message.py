"""A conversation whose last message the answer continues: the prompt ends within that message. Pure.

Source: transformers' `apply_chat_template(continue_final_message=True)`: a mark after the message's text shows where the
template puts it, and the prompt ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.base.errors import BadRequest

_MARK = "\ue000the answer continues here\ue000 "
"""Ends with a space, so that it shows whether the template strips the text."""


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages to render. Raises: BadRequest if the last one has no text."""
    *others, last = messages
    if not isinstance(last.get("content"), str):
        raise BadRequest("continue_final_message needs a last message with text", param="messages")
    return [*others, {**last, "content": last["content"] + _MARK}]


def before_mark(rendered: str) -> str:
    """The prompt: the rendered text up to the end of the last message's content.

    Raises: BadRequest if the template leaves that content out.
    """
    at = rendered.rfind(_MARK.rstrip())
    if at < 0:
        raise BadRequest(
            "the chat template does not show the last message, so it cannot be continued", param="messages"
        )
    text = rendered[:at]
    return text if rendered.startswith(_MARK, at) else text.rstrip()
