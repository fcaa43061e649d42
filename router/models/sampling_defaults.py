"""Sampling defaults from a model's `generation_config.json`, for fields that a request leaves out."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from common.model.config_file import read_generation_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields that a request leaves out. Without the file these are OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None: up to the end of the context. This is not a limit: a request may ask for more."""


NEUTRAL = SamplingDefaults()

_BOUNDS: dict[str, tuple[float, float]] = {
    # key of the file -> allowed range, as for clients
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31 - 1),
}
_WHOLE = ("top_k", "max_new_tokens")


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read the defaults of a model folder; `NEUTRAL` if it has no such file. As in vLLM, `do_sample` is ignored.

    Raises: ConfigError naming file, key and value.
    """
    file, raw = read_generation_config(folder)
    found = {key: _checked(file, key, raw[key]) for key in _BOUNDS if raw.get(key) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    defaults = SamplingDefaults(**found)
    if defaults != NEUTRAL:
        own = {name: value for name, value in asdict(defaults).items() if value != getattr(NEUTRAL, name)}
        log.info("sampling defaults from %s: %s (--generation-config none ignores the file)", file, own)
    return defaults


def _checked(file: Path, key: str, value: Any) -> Any:
    low, high = _BOUNDS[key]
    if key in _WHOLE and isinstance(value, float) and value.is_integer():
        value = int(value)
    kinds = int if key in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise ConfigError(
            f"{file}: {key} must be {'an integer' if key in _WHOLE else 'a number'} from {low:.3g} to {high:.10g}, "
            f"not {value!r}; --generation-config none ignores it"
        )
    return value if key in _WHOLE else float(value)
