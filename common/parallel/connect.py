"""Connects a node's ranks: rendezvous, then the process groups that they need. Runs on a rank's main thread."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from common.base.device import CPU
from common.base.errors import RankLost
from common.parallel import futex
from common.parallel.gloo import GlooGroup, PipelineLink, make_group
from common.parallel.mesh import SOLO, Mesh, RankPlace
from common.parallel.nccl import NcclGroup, make_nccl_group
from common.parallel.rendezvous import Rendezvous
from common.parallel.shared_memory import Segment, SharedMemoryGroup
from common.parallel.stage_tensors import StageSchema

log = logging.getLogger(__name__)


class TensorGroup(Protocol):
    """The tensor-parallel or the context-parallel ranks of one pipeline stage; methods as in `Mesh`."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def gather_columns(self, x: Tensor) -> Tensor | None: ...

    def broadcast(self, x: Tensor) -> None: ...

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor: ...

    def gather_all(self, x: Tensor) -> Tensor: ...

    def close(self) -> None: ...


class RankMesh:
    """`Mesh` of several ranks: a group for each way in which this rank's stage is split, and a link to the neighbouring stages."""

    def __init__(
        self,
        place: RankPlace,
        rendezvous: Rendezvous,
        group: TensorGroup | None,
        pipeline: PipelineLink | None,
        stripes: TensorGroup | None = None,
    ) -> None:
        """`group`: the tensor-parallel ranks; `stripes`: the context-parallel ones."""
        self.place = place
        self.group = group
        self._stripes = stripes
        self._rendezvous = rendezvous
        self._pipeline = pipeline

    def agree(self, what: str, value: str, timeout_s: float | None = None) -> None:
        self._rendezvous.agree(what, value, timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.group is None else self.group.all_reduce(x)

    def gather_columns(self, x: Tensor) -> Tensor | None:
        return x if self.group is None else self.group.gather_columns(x)

    def broadcast(self, x: Tensor) -> None:
        if self.group is not None:
            self.group.broadcast(x)

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        return sent if self.group is None else self.group.all_to_all(sent, sizes)

    def gather_stripes(self, x: Tensor) -> Tensor:
        return x[None] if self._stripes is None else self._stripes.gather_all(x)

    def gather_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        if self._stripes is None:
            return x
        counts = [hi - lo for lo, hi in pairwise(bounds)]
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = self._stripes.gather_all(padded)
        if len(set(counts)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def exchange_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        if self._stripes is None:
            return x[None]
        counts = [hi - lo for lo, hi in pairwise(bounds)]
        sizes = [count * x[0].nbytes for count in counts]
        got = self._stripes.all_to_all(x.contiguous().flatten().view(torch.uint8), [sizes] * len(sizes))
        return got.view(x.dtype).view(len(counts), counts[self.place.cp_rank], *x.shape[1:])

    def send_stage(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        assert self._pipeline is not None
        self._pipeline.send(tensors, schema)

    def recv_stage(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        assert self._pipeline is not None
        return self._pipeline.recv(rows, schema)

    def close(self) -> None:
        for part in (self.group, self._stripes, self._pipeline, self._rendezvous):
            if part is not None:
                part.close()
        self.group = self._stripes = self._pipeline = None


def connect_mesh(
    place: RankPlace,
    *,
    master_address: str,
    master_port: int,
    interface: str,
    timeout_s: float,
    same_host: bool,
    listener: socket.socket | None = None,
    device: torch.device = CPU,
) -> Mesh:
    """Connect to the node's other ranks. Blocks until all are connected.

    Rank 0 listens on `master_address:master_port`, or on `listener` if it is given, a listening socket that it
    takes over. Everything else is bound to `interface`, an interface's name or an address of this host.
    `timeout_s` bounds the rendezvous and later every single exchange, and must exceed the longest step.
    `same_host`: all ranks of a stage are on this host and may share memory; where they cannot, they use TCP.
    `device`: where the exchanged tensors are: each rank's own GPU, or the CPU.
    Raises: RankLost naming the ranks that did not connect in time; ConfigError if ranks disagree on the sizes, or for an
    address or interface that cannot be used.
    """
    if place.world_size == 1:
        return SOLO
    meeting = Rendezvous(place, master_address, master_port, timeout_s, listener)
    opened: list[TensorGroup | PipelineLink] = []

    def join(group: _Group) -> TensorGroup | None:
        if len(group.ranks) == 1:
            return None
        if device.type == "cuda":
            made: TensorGroup = _nccl(group, meeting, interface, timeout_s)
        else:
            shared = _shared_memory(place, group, meeting, timeout_s) if same_host else None
            made = shared or _gloo(group, meeting, interface, timeout_s)
        opened.append(made)
        return made

    try:
        meeting.agree("layout", _sizes(place))
        tensor = join(_Group(f"stage/{place.pp_rank}/{place.cp_rank}", place.tp_rank, place.tp_peers))
        stripes = join(_Group(f"context/{place.pp_rank}/{place.tp_rank}", place.cp_rank, place.cp_peers))
        pipeline: PipelineLink | None = None
        if place.pp_size > 1:
            ranks = place.pp_peers
            store = meeting.group_store(f"pipeline/{place.cp_rank}/{place.tp_rank}")
            make = make_nccl_group if device.type == "cuda" else make_group
            stages = make(store, place.pp_rank, ranks, interface, timeout_s)
            pipeline = PipelineLink(stages, place.pp_rank, ranks, device)
            opened.append(pipeline)
        meeting.agree("connection", "made")
    except BaseException:
        for part in (*opened, meeting):
            part.close()
        raise
    log.info("%s is connected; all-reduce by %s", place, "none" if tensor is None else type(tensor).__name__)
    return RankMesh(place, meeting, tensor, pipeline, stripes)


def _sizes(place: RankPlace) -> str:
    cp = f" x context-parallel {place.cp_size}" if place.cp_size > 1 else ""
    kind = "data-parallel" if place.is_data_parallel else "tensor-parallel"
    return f"{kind} {place.tp_size}{cp} x pipeline-parallel {place.pp_size}"


@dataclass(frozen=True)
class _Group:
    """Ranks that exchange tensors."""

    name: str
    index: int
    """This rank's place in `ranks`."""
    ranks: list[int]


def _gloo(group: _Group, meeting: Rendezvous, interface: str, timeout_s: float) -> GlooGroup:
    made = make_group(meeting.group_store(group.name), group.index, group.ranks, interface, timeout_s)
    return GlooGroup(made, group.index, group.ranks)


def _nccl(group: _Group, meeting: Rendezvous, interface: str, timeout_s: float) -> NcclGroup:
    made = make_nccl_group(meeting.group_store(group.name), group.index, group.ranks, interface, timeout_s)
    return NcclGroup(made, group.index, group.ranks)


def _shared_memory(place: RankPlace, group: _Group, meeting: Rendezvous, timeout_s: float) -> SharedMemoryGroup | None:
    """The group in shared memory, or None on all its ranks if one of them cannot map it."""
    segment = _segment(place, group, None) if group.index == 0 else None
    try:
        name = meeting.exchange(f"segment/{group.name}", segment.name if segment else "", group.ranks)[0]
        if segment is None and name:
            segment = _segment(place, group, name)
        attached = meeting.exchange(f"attached/{group.name}", "yes" if segment else "no", group.ranks)
    except RankLost:
        if segment is not None:
            segment.close()
        raise
    if segment is None:
        return None
    segment.unlink()
    if set(attached) == {"yes"}:
        return SharedMemoryGroup(segment, group.index, group.ranks, timeout_s)
    segment.close()
    return None


def _segment(place: RankPlace, group: _Group, name: str | None) -> Segment | None:
    if not futex.AVAILABLE:
        return None
    try:
        if name is None:
            return Segment.create(group.index, len(group.ranks))
        return Segment.attach(name, group.index, len(group.ranks))
    except (OSError, ValueError) as error:
        log.warning("%s cannot share memory in %s, all-reduces go over TCP: %s", place, futex.SHM_DIR, error)
        return None
