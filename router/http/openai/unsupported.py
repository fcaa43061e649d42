"""Fields of OpenAI or vLLM that would change the answer and are not supported: refused by name. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
            "functions",
            "audio",
            "logits_processors",
            "chat_template",
            "documents",
            "mm_processor_kwargs",
            "structural_tag",
            "prompt_embeds",
            "kv_transfer_params",
            "thinking_token_budget",
            "vllm_xargs",
            "repetition_detection",
            "return_prompt_text",
            "return_token_offsets",
            "ec_transfer_params",
            "watermarking",
        ),
        _absent,
    ),
}
"""By field: whether this value has no effect, and is accepted."""
