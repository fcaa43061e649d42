"""Which layers have a sliding window, and of how many tokens, as config.json says it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from common.model.config_file import ConfigFile, as_list
from common.model.description import LayerDescription

FULL, SLIDING = "full_attention", "sliding_attention"
_DEFAULT_WINDOW = 4096


def window_by_default(config: ConfigFile) -> int | None:
    """`sliding_window`; null means none, a missing key 4,096 tokens."""
    is_null = config.raw.get("sliding_window", 0) is None
    return None if is_null else config.integer("sliding_window", _DEFAULT_WINDOW)


def window_if_given(config: ConfigFile) -> int | None:
    """`sliding_window`; null or a missing key means none."""
    return None if config.raw.get("sliding_window") is None else config.integer("sliding_window")


def window_if_switched_on(config: ConfigFile) -> int | None:
    """`window_by_default` where `use_sliding_window` is true, else none."""
    return window_by_default(config) if config.flag("use_sliding_window", False) else None


def read_layer_types(config: ConfigFile, slides: Callable[[int], bool]) -> list[str]:
    """`layer_types`, `FULL` or `SLIDING` for each layer. `slides(number)`: which it is where config.json has no such list."""
    given, num_layers = config.raw.get("layer_types"), config.num_layers()
    if given is None:
        return [SLIDING if slides(number) else FULL for number in range(num_layers)]
    types = as_list(given)
    if len(types) != num_layers or not all(each in (FULL, SLIDING) for each in types):
        raise config.error(f"layer_types is not a list of {num_layers} times {FULL} or {SLIDING}")
    return types


def with_windows(
    layers: Sequence[LayerDescription], window: int | None, types: Sequence[str] | None = None
) -> tuple[LayerDescription, ...]:
    """`layers` with `window` in those whose type is `SLIDING`; without `types`, in all."""
    sliding = [types is None or types[number] == SLIDING for number in range(len(layers))]
    return tuple(
        replace(layer, attention=replace(layer.attention, window=window)) if slides else layer
        for layer, slides in zip(layers, sliding, strict=True)
    )


def with_windows_in_later_layers(
    config: ConfigFile, layers: Sequence[LayerDescription], default_first: int
) -> tuple[LayerDescription, ...]:
    """`layers` with windows as Qwen's models have them: where switched on, in layers from `max_window_layers` on."""
    window = window_if_switched_on(config)
    if window is None:
        return tuple(layers)
    first = config.count("max_window_layers", default_first)
    return with_windows(layers, window, read_layer_types(config, lambda number: number >= first))
