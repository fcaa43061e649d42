"""Records the steps of a runner on one rank, to run them again on several ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from common.attention.base import AttentionBackend
from common.attention.cpu import CpuAttention
from common.attention.grouped import GroupedAttention
from common.engine.runner import ModelRunner
from common.engine.step import StepInput, StepOutput
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.kv.stripes import Stripe


@dataclass(frozen=True)
class Recording:
    """Steps of an unsharded runner, the tokens that they drew, and the resulting KV."""

    steps: list[StepInput]
    outputs: list[StepOutput]
    kv: list[Tensor]
    """For each layer: [planes, num_blocks, heads, block_size, width]."""

    def kv_error(self, storage: KVStorage) -> float:
        """The largest difference between a rank's KV and its part of the recorded KV."""
        shard = storage.shard
        members = storage.layout.group_layers(shard)
        worst = 0.0
        for group, kv, part, layers in zip(
            storage.layout.spec.groups, storage.groups, shard.parts, members, strict=True
        ):
            blocks = self._blocks_of(group.table, kv.block_size, shard.stripe)
            for ours, layer in zip(kv.stacked, layers, strict=True):
                known = self.kv[shard.layer_lo + layer][:, blocks, part.head_lo : part.head_hi]
                worst = max(worst, (ours[:, blocks] - known).abs().max().item())
        return worst

    def _blocks_of(self, table: int, block_size: int, stripe: Stripe) -> list[int]:
        """What was written through a block table, and is in the stripe: other blocks of its layers' memory belong to layers of
        other tables."""
        places = {
            slot // block_size: position // block_size
            for step in self.steps
            for slot, position in zip(step.slot_mapping[table], step.positions, strict=True)
        }
        return sorted(block for block, place in places.items() if stripe.owns(place))

    def storage_for(self, layout: KVLayout, tp_rank: int, pp_rank: int, cp_rank: int = 0) -> KVStorage:
        """KV memory of a rank with as many blocks as the recorded runner had."""
        return KVStorage(layout, layout.shard(tp_rank, pp_rank, cp_rank), self.kv[0].size(1))

    def steps_in_stripes(self, ranks: int, block_size: int) -> list[StepInput]:
        """The steps for as many context-parallel ranks, each of which has a recorded block at the same place as the recorded
        runner had."""
        return [
            replace(
                step,
                block_tables=[
                    [[block * ranks + i % ranks for i, block in enumerate(table)] for table in tables]
                    for tables in step.block_tables
                ],
                slot_mapping=[
                    [
                        (slot // block_size * ranks + position // block_size % ranks) * block_size + slot % block_size
                        for slot, position in zip(slots, step.positions, strict=True)
                    ]
                    for slots in step.slot_mapping
                ],
            )
            for step in self.steps
        ]


class Recorder:
    """A runner that remembers its steps."""

    def __init__(self, runner: ModelRunner, adapters: Sequence[int] = ()) -> None:
        """`adapters`: the sequences of each step use them by turns."""
        self.runner = runner
        self._adapters = adapters
        self.steps: list[StepInput] = []
        self.outputs: list[StepOutput] = []

    def execute(self, step: StepInput) -> StepOutput:
        if self._adapters:
            names = [self._adapters[i % len(self._adapters)] for i in range(len(step.query_lens))]
            step = replace(step, adapters=names)
        self.steps.append(step)
        self.outputs.append(self.runner.execute(step))
        return self.outputs[-1]

    def write(self, file: Path) -> Recording:
        """Write the recording to `file`, and return the file."""
        layers = range(self.runner._model.config.num_layers)
        recording = Recording(self.steps, self.outputs, [_kv_of(self.runner._attention, layer) for layer in layers])
        file.write_bytes(pickle.dumps(recording))
        return recording


def _kv_of(attention: AttentionBackend, layer: int) -> Tensor:
    if isinstance(attention, GroupedAttention):
        attention, layer = attention.of_layer[layer]
    assert isinstance(attention, CpuAttention)
    return attention._data[layer]
