"""Experts are chosen at a step: where two have nearly equal scores, bfloat16 may choose the other one. How often is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import make_tiny
from support.runner_cases import drive, make_runner, prompt
from support.tiny_models import TINY
from torch import Tensor

from common.model import mlp
from common.model.mixture.routing import Routing

NEAR = 0.3
"""bfloat16 moves the logits of these routers, which deviate by 1.5, by no more."""


def _routed(model: Path, dtype: str, patch: pytest.MonkeyPatch, tokens: list[int]) -> list[tuple[Tensor, Routing]]:
    """Logits and routing of a prompt in the first mixture of the model."""
    found: list[tuple[Tensor, Routing]] = []
    route = mlp.route

    def record(logits: Tensor, *rest: Any) -> Routing:
        routing = route(logits, *rest)
        found.append((logits.clone(), routing))
        return routing

    with patch.context() as own:
        own.setattr(mlp, "route", record)
        own.setattr(mlp, "native_mixture", lambda *_: None)
        drive(make_runner(model, dtype=dtype), [tokens], 1000, 1)
    return found


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_bfloat16_exchanges_experts_only_where_their_scores_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = make_tiny(name, tmp_path / name)
    for file in model.glob("*.safetensors"):
        save_file({key: weight.bfloat16().float() for key, weight in load_file(file).items()}, file, {"format": "pt"})
    tokens = prompt(300, TINY[name].vocab_size)
    (logits, exact), (_, rounded) = (_routed(model, dtype, monkeypatch, tokens)[0] for dtype in ("float32", "bfloat16"))
    chosen = [torch.zeros_like(logits).scatter_(1, each.experts, 1.0) for each in (exact, rounded)]
    is_flipped = (chosen[0] != chosen[1]).any(1)
    print(f"{name}: {int(is_flipped.sum())} of {len(is_flipped)} tokens get another expert in bfloat16")
    ordered = logits.sort(descending=True).values
    gaps = ordered[:, exact.experts.size(1) - 1] - ordered[:, exact.experts.size(1)]
    assert (gaps[is_flipped] < NEAR).all()
    assert is_flipped.float().mean() < 0.1
