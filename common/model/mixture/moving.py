"""Moves experts between the ranks of a stage, in whatever form their weights are. Engine thread, between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.model.mixture.placement import Placement
from common.model.mixture.slots import ExpertSlots
from common.parallel.mesh import Mesh


def tensors_of(part: object) -> Iterator[Tensor]:
    """Every tensor that a linear layer holds: weights in any form, scales, zeros, biases, orders. They are found in the object
    itself, so that no form can leave any behind."""
    if isinstance(part, Tensor):
        yield part
        return
    members: Any = ()
    if isinstance(part, Mapping):
        members = cast("Mapping[Any, Any]", part).values()
    elif isinstance(part, tuple | list):
        members = cast("list[Any]", part)
    elif dataclasses.is_dataclass(part):
        members = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif hasattr(part, "forward"):
        members = vars(part).values()
    for member in members:
        yield from tensors_of(member)


def form_of(layer: ExpertSlots) -> str:
    """The kinds, types and shapes of what each slot of this rank holds, which must be the same in all slots of a layer.

    Raises: ConfigError if they differ, or if oneDNN has packed weights, whose bytes cannot be moved.
    """
    forms = {_form(linears) for linears in layer.linears}
    if len(forms) > 1:
        raise ConfigError(
            "--rebalance-experts needs experts of one form, but a layer of this checkpoint has experts in several formats"
        )
    if any(tensor.is_mkldnn for tensor in tensors_of(layer.linears)):
        raise ConfigError(
            "--rebalance-experts needs the native kernels on a CPU: oneDNN's packed weights cannot be moved"
        )
    return next(iter(forms), "")


def _form(linears: tuple[Any, Any]) -> str:
    kinds = [type(linear).__name__ for linear in linears]
    return f"{kinds} {[(str(each.dtype), tuple(each.shape)) for each in tensors_of(linears)]}"


def move_experts(mesh: Mesh, layer: ExpertSlots, new: Placement) -> None:
    """Place the experts of a layer as in `new`: all ranks of the stage do this together, between the same two steps.

    Each rank keeps the experts that it receives beside its own until it has sent those. Raises: RankLost.
    """
    old, me = layer.placement, layer.rank
    moves = old.moves_to(new)
    size = sum(tensor.nbytes for tensor in tensors_of(layer.linears[0]))
    ends = [(old.rank_of(move.source), old.rank_of(move.slot)) for move in moves]
    ranks = range(old.num_ranks)
    sizes = [[size * ends.count((source, target)) for target in ranks] for source in ranks]
    sent: list[Tensor] = []
    for target in ranks:
        for move, end in zip(moves, ends, strict=True):
            if end == (me, target):
                sent += [_bytes(tensor) for tensor in tensors_of(layer.linears[move.source - layer.own.start])]
    own = layer.counts.new_empty(0, dtype=torch.uint8)
    received = mesh.all_to_all(torch.cat(sent) if sent else own, sizes)
    at = 0
    for source in ranks:
        for move, end in zip(moves, ends, strict=True):
            if end == (source, me):
                for tensor in tensors_of(layer.linears[move.slot - layer.own.start]):
                    stored = received[at : at + tensor.nbytes].clone()  # aligned for any type
                    tensor.copy_(stored.view(tensor.dtype).view(tensor.shape))
                    at += tensor.nbytes
    layer.place(new)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
