"""Reads `--speculate`: the method that drafts tokens, or vLLM's `--speculative-config`. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

from common.base.errors import ConfigError

Method = Literal["suffix", "ngram"]

_METHODS: tuple[Method, ...] = ("suffix", "ngram")
_NOT_SUPPORTED = ("draft", "draft_model", "eagle", "eagle3", "mtp", "medusa")
"""Methods of other servers, and their names in vLLM, that need weights of their own."""
_HARMLESS = ("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_")
"""Keys of vLLM, or their beginnings, that bound what it drafts; here lengths follow from what was accepted."""


@dataclass(frozen=True)
class Speculation:
    """How a decode node drafts tokens."""

    method: Method
    max_drafts: int
    """The most draft tokens that one sequence gets in one step."""
    max_answer_tokens: int = 0
    """Tokens of recent answers that are searched too, those of one tenant apart from the others'."""


def parse_speculation(text: str, max_drafts: int) -> Speculation | None:
    """`off`, `auto`, `suffix`, `ngram`, or vLLM's JSON object. None: nothing is drafted.

    Raises: ConfigError naming what is wrong.
    """
    if text.lstrip().startswith("{"):
        return _of_vllm(text, max_drafts)
    _refuse_weights("--speculate", text.partition(":")[0])
    known: dict[str, Speculation | None] = {
        "off": None,
        "auto": Speculation("suffix", max_drafts),
        "suffix": Speculation("suffix", max_drafts),
        "ngram": Speculation("ngram", max_drafts),
    }
    if text not in known:
        raise ConfigError(f"--speculate {text!r} is none of suffix, ngram, auto and off")
    return known[text]


def _of_vllm(text: str, max_drafts: int) -> Speculation:
    try:
        given: dict[str, Any] = cast("dict[str, Any]", json.loads(text))
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from error
    method, count = given.pop("method", None), given.pop("num_speculative_tokens", max_drafts)
    _refuse_weights("--speculative-config", "draft_model" if method is None and "model" in given else method)
    if method not in _METHODS:
        raise ConfigError(f"--speculative-config: method {method!r} is none of {', '.join(_METHODS)}")
    unknown = [key for key in given if not key.startswith(_HARMLESS)]
    if unknown:
        raise ConfigError(f"--speculative-config: {unknown[0]!r} is not supported")
    if type(count) is not int or not 1 <= count <= 128:
        raise ConfigError("--speculative-config: num_speculative_tokens must be a number from 1 to 128")
    return Speculation(method, count)


def _refuse_weights(option: str, method: object) -> None:
    if method in _NOT_SUPPORTED:
        raise ConfigError(
            f"{option}: guesses by another model or by heads ({method}) are not supported; use suffix or ngram"
        )
