"""Reads `--speculate`: the method that drafts tokens, or vLLM's `--speculative-config`. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

from common.base.errors import ConfigError

Method = Literal["suffix", "ngram", "draft"]

_OF_VLLM: dict[str, Method] = {"ngram": "ngram", "suffix": "suffix", "draft_model": "draft"}
_PLANNED = ("eagle", "eagle3", "mtp", "medusa")
_HARMLESS = ("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_")
"""Keys of vLLM, or their beginnings, that bound what it drafts; here lengths follow from what was accepted."""


@dataclass(frozen=True)
class Speculation:
    """How a decode node drafts tokens."""

    method: Method
    max_drafts: int
    """Of one sequence in one step."""
    model: str = ""
    """Folder, GGUF file or hub name of the draft model."""


def parse_speculation(text: str, max_drafts: int) -> Speculation | None:
    """`off`, `auto`, `suffix`, `ngram`, `draft:MODEL`, or vLLM's JSON object. None: nothing is drafted.

    Raises: ConfigError naming what is wrong.
    """
    if text.lstrip().startswith("{"):
        return _of_vllm(text, max_drafts)
    method, _, model = text.partition(":")
    if method in _PLANNED:
        raise ConfigError(
            f"--speculate {text!r}: heads of the {method} kind are not supported; use suffix, ngram or draft:MODEL"
        )
    if method == "draft" and model:
        return Speculation("draft", max_drafts, model)
    known: dict[str, Speculation | None] = {
        "off": None,
        "auto": Speculation("suffix", max_drafts),
        "suffix": Speculation("suffix", max_drafts),
        "ngram": Speculation("ngram", max_drafts),
    }
    if text not in known:
        raise ConfigError(f"--speculate {text!r} is none of suffix, ngram, draft:MODEL, auto and off")
    return known[text]


def _of_vllm(text: str, max_drafts: int) -> Speculation:
    try:
        given: dict[str, Any] = cast("dict[str, Any]", json.loads(text))
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from error
    count, model = given.pop("num_speculative_tokens", max_drafts), given.pop("model", None)
    method = given.pop("method", "draft_model" if model else None)
    unknown = [key for key in given if not key.startswith(_HARMLESS)]
    if unknown:
        raise ConfigError(f"--speculative-config: {unknown[0]!r} is not supported")
    if method not in _OF_VLLM:
        raise ConfigError(f"--speculative-config: method {method!r} is none of {', '.join(_OF_VLLM)}")
    if type(count) is not int or not 1 <= count <= 128:
        raise ConfigError("--speculative-config: num_speculative_tokens must be a number from 1 to 128")
    if (_OF_VLLM[method] == "draft") != isinstance(model, str):
        raise ConfigError("--speculative-config: model is needed for draft_model, and only for that")
    return Speculation(_OF_VLLM[method], count, model or "")
