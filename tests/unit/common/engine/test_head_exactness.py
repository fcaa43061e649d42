"""The rows of a draft head are those of a slow reference: what it reads, and the logits of each further guess."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.draft_heads import SlowMtp, make_mtp
from support.eagle_heads import SlowEagle, make_eagle
from support.oracle import make_tiny
from torch import Tensor

from common.config.service_configs import DecodeConfig
from common.control.messages import SamplingParams
from common.engine.step import SampleSpec, StepInput
from common.node.worker import load_worker
from common.parallel.mesh import SOLO
from decode_node.role import ROLE

TABLE = [3, 1, 5, 2]
ANY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


def rows(ids: list[int], start: int, *, by_head: bool = False) -> StepInput:
    """Positions from `start` on of the sequence `ids`; the last one draws."""
    positions = list(range(start, len(ids)))
    return StepInput(
        step_id=1,
        token_ids=ids[start:],
        positions=positions,
        slot_mapping=[[TABLE[p // 16] * 16 + p % 16 for p in positions]],
        query_lens=[len(positions)],
        context_lens=[len(ids)],
        block_tables=[[TABLE]],
        num_decode_seqs=int(by_head),
        samples=[SampleSpec(0, len(positions) - 1, ANY, len(ids), 0)],
        by_head=by_head,
    )


@pytest.mark.parametrize("kind", ["glm4-moe", "deepseek-v3", "eagle", "eagle, normed residual", "eagle for gpt-oss"])
def test_features_and_logits_are_those_of_a_slow_reference(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over blocks in any order, in two chunks, with a wrong guess in between that is computed over."""
    is_eagle = kind.startswith("eagle")
    if kind == "eagle for gpt-oss":  # whose layers have windows and sinks
        model = make_tiny("gpt-oss", tmp_path / "model")
    else:
        model = make_mtp("glm4-moe" if is_eagle else kind, tmp_path / "model")
    method, slow = "mtp", None
    if is_eagle:
        head = make_eagle(model, tmp_path / "head", norm_before_residual=kind.endswith("residual"))
        method, slow = f"eagle:{head}", SlowEagle(model, head, has_zero_row=True)
    slow = slow or SlowMtp(model, has_zero_row=True)
    config = DecodeConfig(model=str(model), dtype="float32", speculate=method, kv_blocks=8, max_model_len=64)
    worker = load_worker(ROLE.plan(config), SOLO, small_batches=True)
    worker.allocate_kv(8)
    runner = worker.runner
    assert runner._head is not None
    seen: list[Tensor] = []
    real = runner._head.logits

    def recorded(hidden: Tensor) -> Tensor | None:
        logits = real(hidden)
        assert logits is not None
        seen.append(logits[0].clone())
        return logits

    monkeypatch.setattr(runner._head, "logits", recorded)
    ids = random.Random(4).choices(range(3, 250), k=46)
    guesses = slow.guesses(ids, 3, 0.0, 0)
    runner.execute(rows(ids[:20], 0))
    runner.execute(rows([*ids[:20], 9], 20, by_head=True))  # what it leaves is computed over
    seen.clear()
    runner.execute(rows(ids[:45], 20))
    slots = torch.tensor([TABLE[p // 16] * 16 + p % 16 for p in range(45)])
    torch.testing.assert_close(runner._head._rows[slots], slow.features, atol=2e-4, rtol=1e-4)
    for count in range(3):
        known = [*ids, *guesses[:count]]
        [drawn] = runner.execute(rows(known, len(known) - 1, by_head=True)).sampled
        torch.testing.assert_close(seen[count], slow.logits[count], atol=1e-3, rtol=1e-3)
        assert drawn.token_id == guesses[count]
