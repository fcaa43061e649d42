"""How often the ranks of a stage wait for each other in one step: twice a layer, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.oracle import TINY, make_tiny
from torch import Tensor

from common.config.service_configs import DecodeConfig
from common.node.plan import plan_node
from common.node.profile_run import warm_up
from common.node.worker import load_worker
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace
from common.parallel.stage_tensors import StageSchema


class CountingMesh(Mesh):
    """A rank among silent others: its sums stay its own."""

    def __init__(self, place: RankPlace) -> None:
        super().__init__(place)
        self.sums = self.gathers = self.sent = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        self.gathers += 1
        return torch.cat([x] * self.place.tp_size, 1) if self.place.tp_rank == 0 else None

    def send_stage(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        self.sent += 1

    def recv_stage(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        return {each.name: torch.zeros(rows, *each.shape, dtype=each.dtype) for each in schema}


@pytest.mark.parametrize("name", ["qwen3", "mqa"])
@pytest.mark.parametrize(
    ("rank", "embeddings", "heads"), [(0, 1, 0), (1, 1, 0), (2, 0, 1), (3, 0, 1)], ids=lambda value: str(value)
)
def test_a_step_sums_after_attention_and_after_the_mlp_and_nowhere_else(
    name: str, rank: int, embeddings: int, heads: int, tmp_path: Path
) -> None:
    """Beside the two of each layer: one for the embedding on the first stage, one gathering of logits on the last."""
    folder = make_tiny(name, tmp_path / name)
    config = DecodeConfig(model=str(folder), dtype="float32", kv_blocks=4, tensor_parallel_size=2)
    plan = plan_node(config, pp_size=2)
    mesh = CountingMesh(plan.place(rank))
    worker = load_worker(plan, mesh, small_batches=False)
    worker.allocate_kv(4)
    worker.runner.execute(warm_up())
    layers = worker.shard.layer_hi - worker.shard.layer_lo
    assert 0 < layers < TINY[name].config.num_hidden_layers
    assert (mesh.sums, mesh.gathers, mesh.sent) == (2 * layers + embeddings, heads, 1 - heads)
