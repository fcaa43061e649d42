"""Fields of a body that no known API has: nearly always a misspelt name. Pure.

They are ignored with a warning header, because clients of other servers send fields of their own; with
`--strict-parameters` they are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from pydantic import AliasChoices, BaseModel

from common.base.errors import BadRequest
from router.http.openai.checks import as_object, shorten
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.openai.unsupported import UNSUPPORTED
from router.http.response_headers import printable

WITHOUT_EFFECT = frozenset(
    {
        "media_io_kwargs",
        "metadata",
        "mm_payload",
        "prompt_cache_key",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "stream_interval",
    }
)
"""Fields of OpenAI or vLLM that have no effect on the answer: accepted."""
_MAX_NAMES, _MAX_NAME_CHARS = 16, 64


@cache
def known_fields(kind: type[BaseModel]) -> frozenset[str]:
    """All names that a call knows, whether supported or not."""
    unsupported = UNSUPPORTED.keys() if issubclass(kind, CompletionRequestBase) else frozenset[str]()
    passed_on: frozenset[str] = getattr(kind, "PASSED_ON", frozenset())
    without_effect: frozenset[str] = getattr(kind, "WITHOUT_EFFECT", frozenset())
    aliases = [field.validation_alias for field in kind.model_fields.values()]
    others = {str(name) for each in aliases if isinstance(each, AliasChoices) for name in each.choices}
    return frozenset(kind.model_fields) | others | passed_on | unsupported | WITHOUT_EFFECT | without_effect


def unknown_fields(body: dict[str, Any], kind: type[BaseModel]) -> list[str]:
    """The names in a body that no known API has, or that have no effect here: also in the objects of `KNOWN_WITHIN`, as
    `object.name`, and what `left_out` finds, if the kind has those.
    """
    known = known_fields(kind)
    names = [] if body.keys() <= known else [name for name in body if name not in known]
    within: dict[str, frozenset[str]] = getattr(kind, "KNOWN_WITHIN", {})
    for field, inner in within.items():
        names += [f"{field}.{name}" for name in as_object(body.get(field)) or () if name not in inner]
    left_out: Callable[[dict[str, Any]], list[str]] | None = getattr(kind, "left_out", None)
    return names if left_out is None else names + left_out(body)


def refuse_unknown(names: list[str], kind: type[BaseModel]) -> None:
    """Raises: BadRequest for the first of the names, if any, with the nearest known one."""
    if names:
        name = names[0]
        near = difflib.get_close_matches(name[:_MAX_NAME_CHARS], known_fields(kind), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadRequest(
            f"unknown parameter {shorten(name)}{hint}", param=shorten(name)[1:-1], code="unknown_parameter"
        )


def names_in_header(names: Iterable[str]) -> str:
    """The first names, cut, as a header value."""
    return ", ".join(printable(name, _MAX_NAME_CHARS) for name, _ in zip(names, range(_MAX_NAMES), strict=False))
