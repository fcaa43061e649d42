"""How many layers each stage of a pipeline gets so that all take about as long. Pure."""

from __future__ import annotations

from bench.shape import Shape

_HEAD_SHARE = 0.85
"""Time of the head per weight against that of a layer, which has attention and norms beside its products (measured)."""


def balanced_layers(shape: Shape, stages: int) -> list[int]:
    """Layers per stage, the heaviest stage as light as can be; the last one also computes the head.

    Measured in weights: what a wide batch computes with, and what a narrow one reads.
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
