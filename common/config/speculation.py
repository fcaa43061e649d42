"""Reads `--speculate`: the method that drafts tokens, or vLLM's `--speculative-config`. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

from common.base.errors import ConfigError

Method = Literal["suffix", "ngram", "draft", "mtp", "eagle3"]

HEAD_METHODS: tuple[Method, ...] = ("mtp", "eagle3")
"""Methods whose guesses are made by a head that belongs to the model."""
_OF_VLLM: dict[str, Method] = {
    "suffix": "suffix",
    "ngram": "ngram",
    "draft": "draft",
    "draft_model": "draft",
    **dict.fromkeys(("mtp", "deepseek_mtp", "glm4_moe_mtp"), "mtp"),
    "eagle3": "eagle3",
}
_NOT_SUPPORTED = ("eagle", "medusa")
"""Methods of other servers that need heads of another kind."""
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
    model: str = ""
    """The draft model of the method `draft`, or the head of `eagle3`: a folder, a GGUF file or a name on the hub."""


def parse_speculation(text: str, max_drafts: int) -> Speculation | None:
    """`off`, `auto`, `suffix`, `ngram`, `draft:MODEL`, `mtp`, `eagle:PATH`, or vLLM's JSON object. None: nothing is drafted.

    Raises: ConfigError naming what is wrong.
    """
    if text.lstrip().startswith("{"):
        return _of_vllm(text, max_drafts)
    method, _, model = text.partition(":")
    if method == "draft":
        return _by_model("--speculate draft:MODEL", "draft", model, max_drafts)
    if method in ("eagle", "eagle3"):
        return _by_model("--speculate eagle:PATH", "eagle3", model, max_drafts)
    known: dict[str, Speculation | None] = {
        "off": None,
        "auto": Speculation("suffix", max_drafts),
        "suffix": Speculation("suffix", max_drafts),
        "ngram": Speculation("ngram", max_drafts),
        "mtp": Speculation("mtp", max_drafts),
    }
    if text not in known:
        raise ConfigError(f"--speculate {text!r} is none of suffix, ngram, draft:MODEL, mtp, eagle:PATH, auto and off")
    return known[text]


def _of_vllm(text: str, max_drafts: int) -> Speculation:
    try:
        given: dict[str, Any] = cast("dict[str, Any]", json.loads(text))
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from error
    model, count = given.pop("model", None), given.pop("num_speculative_tokens", max_drafts)
    method = given.pop("method", None if model is None else "draft_model")
    if method in _NOT_SUPPORTED:
        raise ConfigError(
            f"--speculative-config: guesses by heads of the kind {method} are not supported; use eagle3, mtp or suffix"
        )
    if not isinstance(method, str) or method not in _OF_VLLM:
        raise ConfigError(
            f"--speculative-config: method {method!r} is none of ngram, suffix, draft_model, mtp and eagle3"
        )
    unknown = [key for key in given if not key.startswith(_HARMLESS)]
    needs_model = _OF_VLLM[method] in ("draft", "eagle3")
    if model is not None and not needs_model:
        unknown.insert(0, "model")
    if unknown:
        raise ConfigError(f"--speculative-config: {unknown[0]!r} is not supported with the method {method}")
    if type(count) is not int or not 1 <= count <= 128:
        raise ConfigError("--speculative-config: num_speculative_tokens must be a number from 1 to 128")
    if needs_model:
        return _by_model(f"--speculative-config with the method {method}", _OF_VLLM[method], model, count)
    return Speculation(_OF_VLLM[method], count)


def _by_model(option: str, method: Method, model: object, max_drafts: int) -> Speculation:
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{option} needs the {'draft model' if method == 'draft' else 'head'}'s folder or name")
    return Speculation(method, max_drafts, model=model)
