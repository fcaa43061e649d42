"""Connects a node's ranks: rendezvous, then the process groups that they need. Runs on a rank's main thread."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
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
    """The ranks of one pipeline stage; methods as in `Mesh`."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def gather_columns(self, x: Tensor) -> Tensor | None: ...

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor: ...

    def close(self) -> None: ...


class RankMesh:
    """`Mesh` of several ranks: a group for this rank's stage, a link to the neighbouring stages, or both."""

    def __init__(
        self, place: RankPlace, rendezvous: Rendezvous, group: TensorGroup | None, pipeline: PipelineLink | None
    ) -> None:
        self.place = place
        self.group = group
        self._rendezvous = rendezvous
        self._pipeline = pipeline

    def agree(self, what: str, value: str, timeout_s: float | None = None) -> None:
        self._rendezvous.agree(what, value, timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.group is None else self.group.all_reduce(x)

    def gather_columns(self, x: Tensor) -> Tensor | None:
        return x if self.group is None else self.group.gather_columns(x)

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        return sent if self.group is None else self.group.all_to_all(sent, sizes)

    def send_stage(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        assert self._pipeline is not None
        self._pipeline.send(tensors, schema)

    def recv_stage(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        assert self._pipeline is not None
        return self._pipeline.recv(rows, schema)

    def close(self) -> None:
        for part in (self.group, self._pipeline, self._rendezvous):
            if part is not None:
                part.close()
        self.group = self._pipeline = None


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
    try:
        meeting.agree("layout", f"tensor-parallel {place.tp_size} x pipeline-parallel {place.pp_size}")
        group: TensorGroup | None = None
        if place.tp_size > 1:
            if device.type == "cuda":
                group = _nccl(place, meeting, interface, timeout_s)
            else:
                group = _shared_memory(place, meeting, timeout_s) if same_host else None
                group = group or _gloo(place, meeting, interface, timeout_s)
            opened.append(group)
        pipeline: PipelineLink | None = None
        if place.pp_size > 1:
            ranks = [stage * place.tp_size + place.tp_rank for stage in range(place.pp_size)]
            store = meeting.group_store(f"pipeline/{place.tp_rank}")
            make = make_nccl_group if device.type == "cuda" else make_group
            stages = make(store, place.pp_rank, ranks, interface, timeout_s)
            pipeline = PipelineLink(stages, place.pp_rank, ranks, device)
            opened.append(pipeline)
        meeting.agree("connection", "made")
    except BaseException:
        for part in (*opened, meeting):
            part.close()
        raise
    log.info("%s is connected; all-reduce by %s", place, "none" if group is None else type(group).__name__)
    return RankMesh(place, meeting, group, pipeline)


def _gloo(place: RankPlace, meeting: Rendezvous, interface: str, timeout_s: float) -> GlooGroup:
    peers = place.tp_peers
    store = meeting.group_store(f"stage/{place.pp_rank}")
    return GlooGroup(make_group(store, place.tp_rank, peers, interface, timeout_s), place.tp_rank, peers)


def _nccl(place: RankPlace, meeting: Rendezvous, interface: str, timeout_s: float) -> NcclGroup:
    peers = place.tp_peers
    store = meeting.group_store(f"stage/{place.pp_rank}")
    return NcclGroup(make_nccl_group(store, place.tp_rank, peers, interface, timeout_s), place.tp_rank, peers)


def _shared_memory(place: RankPlace, meeting: Rendezvous, timeout_s: float) -> SharedMemoryGroup | None:
    """The stage's group in shared memory, or None on all its ranks if one of them cannot map it."""
    segment = _segment(place, None) if place.tp_rank == 0 else None
    try:
        name = meeting.exchange(f"segment/{place.pp_rank}", segment.name if segment else "", place.tp_peers)[0]
        if segment is None and name:
            segment = _segment(place, name)
        attached = meeting.exchange(f"attached/{place.pp_rank}", "yes" if segment else "no", place.tp_peers)
    except RankLost:
        if segment is not None:
            segment.close()
        raise
    if segment is None:
        return None
    segment.unlink()
    if set(attached) == {"yes"}:
        return SharedMemoryGroup(segment, place.tp_rank, place.tp_peers, timeout_s)
    segment.close()
    return None


def _segment(place: RankPlace, name: str | None) -> Segment | None:
    if not futex.AVAILABLE:
        return None
    try:
        if name is None:
            return Segment.create(place.tp_rank, place.tp_size)
        return Segment.attach(name, place.tp_rank, place.tp_size)
    except (OSError, ValueError) as error:
        log.warning("%s cannot share memory in %s, all-reduces go over TCP: %s", place, futex.SHM_DIR, error)
        return None
