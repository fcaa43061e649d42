"""Reads the rotary embedding's parameters from config.json. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from common.model.config_file import ConfigFile

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope")
"""`rope_type` in config.json. "dynamic" changes frequencies only beyond `max_position_embeddings`, where no context
reaches, "mrope" only angles of images: they are read as "default"."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `inv_freq` derives from these alone. `kind` is "default", "linear", "llama3", "yarn", "longrope" or
    "factors"."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """Also beta_slow of "yarn"."""
    high_freq_factor: float = 4.0
    """Also beta_fast of "yarn"."""
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    """[rotated_dim / 2]: divisor of each frequency, for "factors" and "longrope"."""
    short_factors: tuple[float, ...] = ()
    """`factors` of "longrope" where contexts are at most `original_max_position` long."""
    attention_factor: float = 1.0
    """Factor of rotated q and k."""
    rotated_part: float = 1.0
    """The part of each head, from its start, that is rotated."""
    truncates: bool = True
    """Whether "yarn" widens the range of blended frequencies to whole numbers."""

    def rotated_dim(self, head_dim: int) -> int:
        """How many features of a head are rotated."""
        return int(head_dim * self.rotated_part)

    def for_context(self, max_model_len: int) -> RopeConfig:
        """The same for contexts of at most this many tokens. "longrope" has other factors for short ones; all contexts of a
        node take the same, because blocks of their beginnings are shared."""
        if self.kind != "longrope" or max_model_len > self.original_max_position:
            return self
        return replace(self, kind="factors", factors=self.short_factors, short_factors=())


def read_rope(
    config: ConfigFile,
    default_theta: float = 10000.0,
    parameters: dict[str, Any] | None = None,
    *,
    default_in_part: bool = False,
) -> RopeConfig:
    """The rope parameters, under the keys of transformers 5 or 4. As in transformers, `rope_scaling` goes first: users add it to
    configs that have both.

    `parameters`: those of a kind of layers, where kinds differ, instead of the file's. `default_in_part`:
    `partial_rotary_factor` also counts without scaling, where transformers' other classes ignore it.
    """
    scaling = config.object("rope_scaling") or config.object("rope_parameters") if parameters is None else parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = config.number("rope_theta", config.number("rope_theta", default_theta), within=scaling)
    part = config.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0), within=scaling)
    if part > 1:
        raise config.error(f"partial_rotary_factor is {part}, more than a whole head")
    in_part = default_in_part or kind not in ("default", "mrope")
    rope = RopeConfig(theta, rotated_part=part if in_part else 1.0)
    if kind in ("default", "dynamic", "mrope"):
        return rope
    if kind == "factors":
        return replace(rope, kind=kind, factors=_read_factors(config, scaling, "factors"))
    if kind in ("longrope", "su"):
        return _read_longrope(config, scaling, rope)
    if kind not in KINDS:
        raise config.error(f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}")
    rope = replace(rope, kind=kind, factor=config.number("factor", within=scaling))
    if kind == "linear":
        return rope
    if kind == "yarn":
        return _read_yarn(config, scaling, rope)
    return replace(
        rope,
        low_freq_factor=config.number("low_freq_factor", within=scaling),
        high_freq_factor=config.number("high_freq_factor", within=scaling),
        original_max_position=_original_max_position(config, scaling),
    )


def _original_max_position(config: ConfigFile, scaling: dict[str, Any]) -> int:
    """Beside the rope parameters, else in them, else the context's length, as in transformers."""
    key = "original_max_position_embeddings"
    default = None if config.raw.get("max_position_embeddings") is None else config.integer("max_position_embeddings")
    original = int(config.number(key, config.number(key, default, within=scaling)))
    if not 2 <= original < 2**31:
        raise config.error(f"{key} must be from 2 to {2**31 - 1}, not {original}")
    return original


def _read_yarn(config: ConfigFile, scaling: dict[str, Any], rope: RopeConfig) -> RopeConfig:
    def magnitude(multiplier: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * multiplier * math.log(rope.factor) + 1.0

    if rope.theta <= 1:
        raise config.error(f"rope_theta must be above 1 with yarn, not {rope.theta}")
    default = magnitude()
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        of_q_k, of_all = (config.number(key, within=scaling) for key in ("mscale", "mscale_all_dim"))
        default = magnitude(of_q_k) / magnitude(of_all)
    return replace(
        rope,
        low_freq_factor=config.number("beta_slow", 1.0, within=scaling),
        high_freq_factor=config.number("beta_fast", 32.0, within=scaling),
        original_max_position=_original_max_position(config, scaling),
        attention_factor=config.number("attention_factor", default, within=scaling),
        truncates=scaling.get("truncate") is not False,
    )


def _read_longrope(config: ConfigFile, scaling: dict[str, Any], rope: RopeConfig) -> RopeConfig:
    original = _original_max_position(config, scaling)
    reach = config.integer("max_position_embeddings", original)
    factor = config.number("factor", reach / original, within=scaling)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    long, short = (_read_factors(config, scaling, key) for key in ("long_factor", "short_factor"))
    rope = replace(
        rope,
        kind="longrope",
        original_max_position=original,
        factors=long,
        short_factors=short,
        attention_factor=config.number("attention_factor", default, within=scaling),
    )
    return rope.for_context(reach)


def _read_factors(config: ConfigFile, scaling: dict[str, Any], key: str) -> tuple[float, ...]:
    values = scaling.get(key)
    if not isinstance(values, list):
        raise config.error(f"{key} of the rope parameters is not a list")
    return tuple(config.number(key, within={key: value}) for value in cast("list[Any]", values))
