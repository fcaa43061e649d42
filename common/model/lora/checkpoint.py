"""LoRA adapters as peft stores them: `adapter_config.json` and `adapter_model.safetensors`. Any thread.

Everything that can be wrong with an adapter is found here, from the headers of its files and the model's description.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from llguidance import LLMatcher, LLTokenizer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.base.clock import monotonic
from common.base.errors import ConfigError
from common.model.config import ModelConfig
from common.model.config_file import as_object

_MAX_PATTERN_CHARS = 512


class PatternError(ValueError):
    """The pattern is malformed, too long or too complex, or uses what the engine does not have (look-around, back references)."""


@cache
def _byte_tokenizer() -> LLTokenizer:
    """A tokenizer with a token for each byte."""
    return LLTokenizer("byte")


class BoundedPattern:
    """A pattern in the syntax of Rust's `regex` crate, which has that of Python's `re` without look-around. Its engine does not
    backtrack: no pattern and no text makes a match take long.

    Raises: PatternError.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise PatternError(f"it has {len(pattern)} characters, more than {_MAX_PATTERN_CHARS}")
        self._matcher = LLMatcher(_byte_tokenizer(), LLMatcher.grammar_from_regex(pattern), log_level=0)
        self._check()

    def fullmatch(self, text: str) -> bool:
        """Whether it matches the whole text. Raises: PatternError if it is too complex for that."""
        data = list(text.encode())
        consumed = self._matcher.try_consume_tokens(data)
        self._check()
        found = consumed == len(data) and self._matcher.is_accepting()
        self._matcher.reset()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            raise PatternError(" ".join(self._matcher.get_error().partition("\n<state>")[0].split())[:300])


MAX_RANK = 256
"""Highest rank of an adapter."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` whose adapters belong to base weights that were changed too."""
_DTYPES = ("F32", "F16", "BF16")
_PLAIN = re.compile(r"[\w.-]+")
"""Patterns that Python's engine matches without trying again: most are the names of modules."""
_MAX_PATTERNS, _MATCHING_S = 4096, 10.0
_MAX_ALPHA = 1e30
"""The native kernels take scales in float32."""


@dataclass(frozen=True)
class LoraModule:
    """The adapter's part of one linear layer: scale * (x A^T) B^T."""

    a: str
    """Name of the tensor [rank, in]."""
    b: str
    """Name of the tensor [out, rank]."""
    rank: int
    scale: float


Place = tuple[int, str]
"""Number of a layer, and the name of a linear layer in it."""


@dataclass(frozen=True)
class LoraCheckpoint:
    """A checked adapter: every tensor exists, in the shape that the model needs."""

    path: Path
    modules: dict[Place, LoraModule]

    def read(self) -> dict[Place, tuple[Tensor, Tensor]]:
        """(A, B) of every module. Raises: ConfigError if the file cannot be read."""
        file = self.path / _WEIGHTS
        try:
            with safe_open(file, framework="pt") as opened:
                return {
                    place: (opened.get_tensor(module.a), opened.get_tensor(module.b))
                    for place, module in self.modules.items()
                }
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error

    def digest(self, tensors: dict[Place, tuple[Tensor, Tensor]]) -> str:
        """Hexadecimal SHA-256 of what the adapter adds: its places, scales and weights. `tensors`: of `read`."""
        digest = hashlib.sha256()
        for place in sorted(tensors):
            digest.update(f"{place} {self.modules[place].scale!r}".encode())
            for tensor in tensors[place]:
                digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def open_adapter(path: Path, config: ModelConfig, max_rank: int = MAX_RANK) -> LoraCheckpoint:
    """The adapter in the folder `path`, for the model of `config`.

    Raises: ConfigError in one sentence if it is unreadable, unsupported, larger than `max_rank` or for another model.
    """
    settings = _read_settings(path / _CONFIG)
    _check_supported(settings, path)
    shapes = _read_shapes(path / _WEIGHTS)
    modules = _find_modules(shapes, settings, config, path)
    expected = [linear_shapes(config, number) for number in range(config.num_layers)]
    for (number, name), module in modules.items():
        out, inputs = expected[number][name]
        if shapes[module.a][1] != inputs or shapes[module.b][0] != out:
            found = f"[{shapes[module.b][0]}, {shapes[module.a][1]}]"
            raise ConfigError(
                f"{path} is for another base model ({settings.get('base_model_name_or_path') or 'not named'}): it adapts "
                f"{name} of shape {found}, and this model's is [{out}, {inputs}]"
            )
        if module.rank > max_rank:
            raise ConfigError(f"{path} has rank {module.rank}, and this node accepts at most {max_rank}")
    return LoraCheckpoint(path, modules)


def linear_shapes(config: ModelConfig, number: int) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear layer in layer `number`, by the name of its weights."""
    layer, names, hidden = config.layers[number], config.weight_names, config.hidden_size
    shapes: dict[str, tuple[int, int]] = {}
    for name, out, inputs in (*layer.attention.linears(names, hidden), *layer.mlp.linears(names, hidden)):
        shapes[name] = (shapes.get(name, (0, inputs))[0] + out, inputs)
    return shapes


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", found)


def _check_supported(settings: dict[str, Any], path: Path) -> None:
    """Refuse what nodes do not have. Raises: ConfigError naming it."""
    kind, bias, init = settings.get("peft_type"), settings.get("bias", "none"), settings.get("init_lora_weights")
    changes_base = isinstance(init, str) and init.lower().startswith(_CHANGES_BASE)  # peft takes "OLoRA", too
    if kind != "LORA":
        raise ConfigError(f"{path} is no LoRA adapter: its peft_type is {kind!r}")
    reasons = {
        "DoRA": settings.get("use_dora"),
        f"biases (bias {bias!r})": bias != "none" or settings.get("lora_bias"),
        f"modules trained whole (modules_to_save {settings.get('modules_to_save')})": settings.get("modules_to_save"),
        "trained tokens": settings.get("trainable_token_indices"),
        "trained parameters (target_parameters)": settings.get("target_parameters"),
        "repeated layers (layer_replication)": settings.get("layer_replication"),
        "activation by tokens (aLoRA)": settings.get("alora_invocation_tokens"),
        "quantization-aware LoRA": settings.get("use_qalora"),
        "block-diagonal LoRA": settings.get("use_bdlora"),
        "KaSA": settings.get("kasa_config"),
        "Monte Carlo LoRA": settings.get("monteclora_config"),
        "routing between adapters (Arrow)": settings.get("arrow_config"),
        f"changed base weights (init_lora_weights {init!r})": changes_base,
    }
    for what, is_needed in reasons.items():
        if is_needed:
            raise ConfigError(f"{path} needs {what}, which is not supported")


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's tensors. Raises: ConfigError."""
    if not file.exists():
        raise ConfigError(f"{file} does not exist: adapters are read from safetensors files only")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ConfigError(f"{file}: tensor {name} has type {dtype}; known: {', '.join(_DTYPES)}")
    return shapes


def _find_modules(
    shapes: dict[str, tuple[int, ...]], settings: dict[str, Any], config: ModelConfig, path: Path
) -> dict[Place, LoraModule]:
    """Raises: ConfigError for tensors that belong to no linear layer of the model, or if half of an A/B pair is missing."""
    container = config.weight_names.layer.removesuffix(".{number}").rpartition(".")[2]
    in_layer = re.compile(rf"(?:.*\.)?{re.escape(container)}\.(\d+)\.(.+)")
    known = [linear_shapes(config, number) for number in range(config.num_layers)]
    pairs: dict[Place, dict[str, str]] = {}
    full_names: dict[Place, str] = {}
    for tensor in shapes:
        found = _TENSOR.fullmatch(tensor)
        if found is None:
            raise ConfigError(f"{path} has the tensor {tensor}, which is no A or B of a linear layer")
        place = in_layer.fullmatch(found[1])
        number = int(place[1]) if place else -1
        if place is None or number >= config.num_layers or place[2] not in known[number]:
            raise ConfigError(f"{path} adapts {found[1]}, which is no linear layer of {config.architecture} here")
        pair = pairs.setdefault((number, place[2]), {})
        if found[2] in pair:
            raise ConfigError(f"{path} adapts {place[2]} of layer {number} twice: as {pair[found[2]]} and {tensor}")
        pair[found[2]] = tensor
        full_names[number, place[2]] = found[1]
    if not pairs:
        raise ConfigError(f"{path} adapts no linear layer")
    modules: dict[Place, LoraModule] = {}
    rules = _Rules(settings)
    for at, pair in pairs.items():
        if len(pair) < 2 or any(len(shapes[name]) != 2 for name in pair.values()):
            raise ConfigError(f"{path} has no matrices A and B for {full_names[at]}")
        rank = shapes[pair["A"]][0]
        if rank < 1 or shapes[pair["B"]][1] != rank:
            raise ConfigError(f"{path}: A of {full_names[at]} has rank {rank}, its B {shapes[pair['B']][1]}")
        modules[at] = LoraModule(pair["A"], pair["B"], rank, _scale(settings, rules, full_names[at], rank, path))
    return modules


def _scale(settings: dict[str, Any], rules: _Rules, name: str, rank: int, path: Path) -> float:
    """Raises: ConfigError if the rank is not the one that adapter_config.json promises, or alpha is no number."""
    promised, alpha = rules.value("rank_pattern", name, "r"), rules.value("alpha_pattern", name, "lora_alpha")
    if promised != rank:
        raise ConfigError(f"{path}: {name} has rank {rank}, and {_CONFIG} says {promised}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
        raise ConfigError(f"{path}: lora_alpha {repr(alpha)[:100]} is no number up to {_MAX_ALPHA:g}")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


class _Rules:
    """`rank_pattern` and `alpha_pattern`: values of the modules whose names end with a match, as peft reads them.

    Raises: ConfigError for patterns that cannot be used, too many of them, or if matching takes too long altogether.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._deadline_s = monotonic() + _MATCHING_S
        self._patterns = {key: self._read(key) for key in ("rank_pattern", "alpha_pattern")}

    def _read(self, key: str) -> list[tuple[BoundedPattern | re.Pattern[str], Any]]:
        patterns = as_object(self._settings.get(key))
        if len(patterns) > _MAX_PATTERNS:
            raise ConfigError(f"{_CONFIG}: {key} has {len(patterns)} patterns, more than {_MAX_PATTERNS}")
        return [(self._compiled(key, pattern), value) for pattern, value in patterns.items()]

    def _compiled(self, key: str, pattern: str) -> BoundedPattern | re.Pattern[str]:
        if _PLAIN.fullmatch(pattern):
            return re.compile(rf"(?:.*\.)?{pattern}")
        whole, before = pattern, r"(?:.*\.)?"
        if "|" not in pattern:  # the engine has no anchors, and a match is always one of the whole name
            whole = pattern.removeprefix("^").removesuffix("$")
            before = "" if pattern.startswith("^") else before
        try:
            return BoundedPattern(f"{before}(?:{whole})")
        except PatternError as error:
            raise ConfigError(
                f"{_CONFIG}: {pattern[:100]!r} in {key} is no pattern that can be used: {error}"
            ) from error

    def value(self, key: str, name: str, default: str) -> Any:
        """The value of the first pattern that matches the end of a module's name, or else that of the field `default`."""
        for pattern, value in self._patterns[key]:
            if monotonic() > self._deadline_s:
                raise ConfigError(f"{_CONFIG}: to match its patterns takes more than {_MATCHING_S:g} s")
            try:
                if pattern.fullmatch(name):
                    return value
            except PatternError as error:
                raise ConfigError(f"{_CONFIG}: a pattern in {key} is too complex: {error}") from error
        return self._settings.get(default)
