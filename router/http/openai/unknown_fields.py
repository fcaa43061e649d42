"""Fields of a body that its call does not have. Pure.

Some of OpenAI or vLLM would change the answer: they are refused by name. Others have no effect, and are accepted. One that no known
API has is nearly always a misspelt name: it is ignored with a warning header, because clients of other servers send fields of
their own; with `--strict-parameters` it is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from pydantic import AliasChoices

from common.base.errors import BadRequest
from router.http.body_model import BodyModel
from router.http.openai.checks import as_object, shorten
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.response_headers import printable


def _absent(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


def _only(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == each and type(value) is not bool for each in harmless)


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "function_call": _only("none", "auto"),
    "routed_experts_prompt_start": _only(0),
    "verbosity": _only("medium"),
    "web_search_options": lambda value: value is None,  # {} asks for a search
    "modalities": lambda value: value is None or value == ["text"],
    **dict.fromkeys(
        (
            *("functions", "audio", "logits_processors", "chat_template", "documents", "mm_processor_kwargs"),
            *("structural_tag", "prompt_embeds", "kv_transfer_params", "thinking_token_budget", "vllm_xargs"),
            *("repetition_detection", "return_prompt_text", "return_token_offsets", "ec_transfer_params"),
            "watermarking",
        ),
        _absent,
    ),
}
"""By field: whether this value has no effect, and is accepted."""

WITHOUT_EFFECT = frozenset(
    {
        *(
            "media_io_kwargs",
            "metadata",
            "mm_payload",
            "prompt_cache_key",
            "prompt_cache_retention",
            "return_mm_kwargs",
        ),
        *("safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store"),
        "stream_interval",
    }
)
"""Fields of OpenAI or vLLM that have no effect on the answer: accepted."""
_MAX_NAMES, _MAX_NAME_CHARS = 16, 64


@cache
def known_fields(kind: type[BodyModel]) -> frozenset[str]:
    """All names that a call knows, whether supported or not."""
    unsupported = UNSUPPORTED.keys() if issubclass(kind, CompletionRequestBase) else frozenset[str]()
    aliases = [field.validation_alias for field in kind.model_fields.values()]
    others = {str(name) for each in aliases if isinstance(each, AliasChoices) for name in each.choices}
    return frozenset(kind.model_fields) | others | kind.PASSED_ON | unsupported | WITHOUT_EFFECT | kind.WITHOUT_EFFECT


def unknown_fields(body: dict[str, Any], kind: type[BodyModel]) -> list[str]:
    """The names in a body that no known API has, or that have no effect here: also in the objects of `KNOWN_WITHIN`, as
    `object.name`, and what `left_out` finds.
    """
    known = known_fields(kind)
    names = [] if body.keys() <= known else [name for name in body if name not in known]
    for field, inner in kind.KNOWN_WITHIN.items():
        names += [f"{field}.{name}" for name in as_object(body.get(field)) or () if name not in inner]
    return names + kind.left_out(body)


def refuse_unknown(names: list[str], kind: type[BodyModel]) -> None:
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
