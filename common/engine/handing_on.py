"""Copies KV that all ranks of a stage hold whole from the first rank, which received it, to the others. Engine thread, before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.device_inputs import to_device
from common.engine.step import HandedOn
from common.kv.storage import KVStorage
from common.parallel.mesh import Mesh

_BLOCKS_AT_ONCE = 256
"""Bounds the copies that are made: a sequence that arrives while nothing runs is handed on in one step."""


@torch.inference_mode()
def hand_on(storage: KVStorage, received: Sequence[HandedOn], mesh: Mesh) -> None:
    """Copy the blocks of each layer group from the first rank of the stage to the others, layer after layer. All ranks of
    the stage do this together. Raises: RankLost."""
    stripe = storage.shard.stripe
    for number, of_node in received:
        group = storage.groups[number]
        blocks = [stripe.local(block) for block in of_node if stripe.owns(block)]
        for lo in range(0, len(blocks), _BLOCKS_AT_ONCE):
            index = to_device(blocks[lo : lo + _BLOCKS_AT_ONCE], group.device)
            for layer in (layer for plane in group.planes.values() for layer in plane.view(torch.uint8)):
                rows = (
                    layer.index_select(0, index)
                    if mesh.place.tp_rank == 0
                    else layer.new_empty(len(index), *layer.shape[1:])
                )
                mesh.broadcast(rows.view(-1))
                if mesh.place.tp_rank:
                    layer.index_copy_(0, index, rows)
