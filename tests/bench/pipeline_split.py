"""How many layers each stage of a pipeline gets so that all take about as long. Pure."""

from __future__ import annotations

from bench.shape import Shape

_HEAD_SHARE = 0.85
"""Time of the LM head per weight relative to that of a layer, which also has attention and norms (measured)."""


def balanced_layers(shape: Shape, stages: int) -> list[int]:
    """Layers per stage, such that the heaviest stage is as light as possible; the last stage also computes the LM head.

    The unit is weights: a large batch computes with them, a small one reads them.
    """
    layer = shape.layer_weights / shape.layers
    head_in_layers = _HEAD_SHARE * shape.vocab * shape.hidden / layer
    best: list[int] = []
    for last in range(1, shape.layers - stages + 2):
        each, rest = divmod(shape.layers - last, stages - 1)
        split = [each + (stage < rest) for stage in range(stages - 1)] + [last]
        if not best or _heaviest(split, head_in_layers) < _heaviest(best, head_in_layers):
            best = split
    return best


def _heaviest(split: list[int], head_in_layers: float) -> float:
    return max(*split[:-1], split[-1] + head_in_layers)
