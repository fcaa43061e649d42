"""Connects a node's ranks: rendezvous, then the process groups that they need. Runs on a rank's main thread."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

import torch

from common.base.device import CPU
from common.base.errors import RankLost
from common.parallel import futex
from common.parallel.gloo import GlooGroup, PipelineLink, make_group
from common.parallel.mesh import SOLO, Mesh, RankGroup
from common.parallel.nccl import NcclGroup, make_nccl_group
from common.parallel.place import RankPlace
from common.parallel.rendezvous import Rendezvous
from common.parallel.shared_memory import Segment, SharedMemoryGroup

log = logging.getLogger(__name__)


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
    opened: list[RankGroup | PipelineLink] = []
    on_gpus = device.type == "cuda"

    def connect(group: _Group) -> Any:
        make = make_nccl_group if on_gpus else make_group
        return make(meeting.group_store(group.name), group.index, group.ranks, interface, timeout_s)

    def join(group: _Group) -> RankGroup | None:
        if len(group.ranks) == 1:
            return None
        made = _shared_memory(place, group, meeting, timeout_s) if same_host and not on_gpus else None
        if made is None:
            made = (NcclGroup if on_gpus else GlooGroup)(connect(group), group.index, group.ranks)
        opened.append(made)
        return made

    try:
        meeting.agree("layout", _sizes(place))
        tensor = join(_Group(f"stage/{place.pp_rank}/{place.cp_rank}", place.tp_rank, place.tp_peers))
        stripes = join(_Group(f"context/{place.pp_rank}/{place.tp_rank}", place.cp_rank, place.cp_peers))
        pipeline: PipelineLink | None = None
        if place.pp_size > 1:
            stages = _Group(f"pipeline/{place.cp_rank}/{place.tp_rank}", place.pp_rank, place.pp_peers)
            pipeline = PipelineLink(connect(stages), stages.index, stages.ranks, device)
            opened.append(pipeline)
        meeting.agree("connection", "made")
    except BaseException:
        for part in (*opened, meeting):
            part.close()
        raise
    log.info("%s is connected; all-reduce by %s", place, "none" if tensor is None else type(tensor).__name__)
    return Mesh(place, meeting, tensor, stripes, pipeline)


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
        return Segment(group.index, len(group.ranks), name)
    except (OSError, ValueError) as error:
        log.warning("%s cannot share memory in %s, all-reduces go over TCP: %s", place, futex.SHM_DIR, error)
        return None
