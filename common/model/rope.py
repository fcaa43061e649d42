"""Reads the rotary embedding's parameters from config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from common.model.config_file import ConfigFile


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `inv_freq` derives from these alone. `kind` is "default", "linear", "llama3" or "factors"."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    """Of "factors": what each frequency is divided by, [head_dim / 2]."""


def read_rope(config: ConfigFile) -> RopeConfig:
    """The rope parameters, under the keys of transformers 5 or 4."""
    raw = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise config.error("its rope parameters are not an object")
    scaling = cast("dict[str, Any]", raw)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = config.number("rope_theta", config.number("rope_theta", 10000.0), within=scaling)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "factors":
        return RopeConfig(theta, kind, factors=tuple(scaling["factors"]))
    factor = config.number("factor", within=scaling)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor,
            config.number("low_freq_factor", within=scaling),
            config.number("high_freq_factor", within=scaling),
            int(config.number("original_max_position_embeddings", within=scaling)),
        )
    raise config.error(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
