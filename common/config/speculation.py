"""The options of speculation. `--speculate` names the method that drafts tokens, or is vLLM's `--speculative-config`. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

from common.base.errors import ConfigError
from common.config.fields import option

Method = Literal["suffix", "ngram", "draft", "mtp", "eagle3"]

_speculation_option = partial(option, group="Speculation")

HEAD_METHODS: tuple[Method, ...] = ("mtp", "eagle3")
"""Methods whose guesses are made by a head that belongs to the model."""
_OF_VLLM: dict[str, Method] = {
    **{method: method for method in get_args(Method)},
    "draft_model": "draft",
    **dict.fromkeys(("deepseek_mtp", "glm4_moe_mtp"), "mtp"),
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
    known: dict[str, Method] = {"auto": "suffix", "suffix": "suffix", "ngram": "ngram", "mtp": "mtp"}
    if text != "off" and text not in known:
        raise ConfigError(f"--speculate {text!r} is none of suffix, ngram, draft:MODEL, mtp, eagle:PATH, auto and off")
    return None if text == "off" else Speculation(known[text], max_drafts)


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


def _by_model(given: str, method: Method, model: object, max_drafts: int) -> Speculation:
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{given} needs the {'draft model' if method == 'draft' else 'head'}'s folder or name")
    return Speculation(method, max_drafts, model=model)


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How decode nodes compute several tokens of a stream in one step."""

    speculate: str = _speculation_option(
        "off",
        "Guess the next tokens of each stream and verify them in one step: suffix (what followed the same tokens before in the "
        "prompt and the answer), ngram (only the latest such place), draft:MODEL (a small model with the same "
        "vocabulary), mtp (the model's own layer for it), eagle:PATH (an EAGLE-3 head), auto (suffix) or off. Prefill nodes "
        "need mtp and eagle:PATH too. The answers are the same; where guesses do not pay, fewer or none are made.",
        "--speculative-config",
    )
    speculate_tokens: int = _speculation_option(
        16, "Maximum number of tokens guessed for one stream in one step.", low=1, high=128
    )
    speculate_answers: int = _speculation_option(
        0,
        "Number of tokens of recent answers that suffix and ngram search too; 0: none. A client's guesses come only from answers to "
        "its own API key (without keys: its address). A token takes 300 bytes.",
        low=0,
        high=10_000_000,
    )

    @property
    def speculation(self) -> Speculation | None:
        """None: nothing is guessed. Raises: ConfigError."""
        found = parse_speculation(self.speculate, self.speculate_tokens)
        if self.speculate_answers and (found is None or found.method not in ("suffix", "ngram")):
            raise ConfigError("--speculate-answers needs --speculate suffix or ngram, which search these answers")
        return found and replace(found, max_answer_tokens=self.speculate_answers)
