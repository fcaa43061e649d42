"""Collectives among ranks on any hosts, by torch's gloo over TCP. Runs on ranks' engine threads.

Groups are built from a store and an interface; torch's global default group is never used.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions, GatherOptions, Store

from common.base.device import CPU
from common.base.errors import ConfigError, RankLost
from common.parallel.stage_tensors import StageSchema, empty_message, pack, unpack
from common.parallel.torch_reason import torch_reason

_T = TypeVar("_T")
_Group = Any
"""A `ProcessGroupGloo`, most of whose methods torch's stubs do not know."""


def make_group(store: Store, index: int, ranks: list[int], interface: str, timeout_s: float) -> _Group:
    """The gloo group of the `ranks`; this one is the `index`-th. Listens on `interface` only.

    `interface` is a network interface's name or an address of this host.
    Raises: ConfigError if there is no such interface; RankLost if a member did not connect within `timeout_s`.
    """
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    try:
        options._devices = [_device(interface)]
    except RuntimeError as error:
        raise ConfigError(f"cannot use network interface {interface!r}: {torch_reason(error)}") from error
    try:
        return ProcessGroupGloo(store, index, len(ranks), options)
    except RuntimeError as error:
        raise RankLost(f"ranks {ranks} did not connect to each other on {interface}: {torch_reason(error)}") from error


def _device(interface: str) -> object:
    try:
        ipaddress.ip_address(interface)
    except ValueError:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=interface)


class GlooGroup:
    """A `common.parallel.mesh.RankGroup` of ranks on any hosts."""

    def __init__(self, group: _Group, index: int, ranks: list[int]) -> None:
        self._group = group
        self._index = index
        self._ranks = ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        _complete(lambda: self._group.allreduce([x]), f"all-reduce among ranks {self._ranks}")
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        parts = [torch.empty_like(x) for _ in self._ranks] if self._index == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        outputs = [parts] if parts else []
        _complete(lambda: self._group.gather(outputs, [x], options), f"gather among ranks {self._ranks}")
        return torch.cat(parts, 1) if parts else None

    def broadcast(self, x: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        _complete(lambda: self._group.broadcast([x], options), f"broadcast among ranks {self._ranks}")

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        mine = [row[self._index] for row in sizes]
        received = sent.new_empty(sum(mine))
        outgoing = list(sizes[self._index])
        _complete(
            lambda: self._group.alltoall_base(received, sent, mine, outgoing, AllToAllOptions()),
            f"all-to-all among ranks {self._ranks}",
        )
        return received

    def gather_all(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(self._ranks), *x.shape)
        _complete(lambda: self._group.allgather([list(out.unbind())], [x]), f"all-gather among ranks {self._ranks}")
        return out

    def close(self) -> None:
        self._group.shutdown()


class PipelineLink:
    """The tensors that one pipeline stage hands to the next, among the ranks with one `tp_rank`.

    Sends complete in the background, so that a stage computes its next micro-batch while the next stage is
    still busy with an earlier one. Both ends count, so that messages are received in the order of sending.
    """

    def __init__(self, group: _Group, pp_rank: int, ranks: list[int], device: torch.device = CPU) -> None:
        self._group = group
        self._device = device
        self._pp_rank = pp_rank
        self._ranks = ranks
        self._most_in_flight = len(ranks)
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._sent = 0
        self._received = 0

    def send(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        """See `Mesh.send_stage`."""
        message = pack(tensors, schema)
        to = self._pp_rank + 1
        what = f"hidden states to rank {self._ranks[to]}"
        while len(self._in_flight) >= self._most_in_flight:
            work, _ = self._in_flight.popleft()
            _run(work.wait, what)
        # Kept with the work, because gloo reads the message until that is done.
        self._in_flight.append((_run(lambda: self._group.send([message], to, _tag(self._sent)), what), message))
        self._sent += 1

    def recv(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        """See `Mesh.recv_stage`."""
        message = empty_message(rows, schema, self._device)
        source = self._pp_rank - 1
        tag = _tag(self._received)
        _complete(lambda: self._group.recv([message], source, tag), f"hidden states from rank {self._ranks[source]}")
        self._received += 1
        return unpack(message, rows, schema)

    def close(self) -> None:
        self._in_flight.clear()
        if self._device.type == "cuda":
            self._group.abort()  # see `NcclGroup.close`
        else:
            self._group.shutdown()


def _tag(count: int) -> int:
    return count % 2**30


def _complete(start: Callable[[], Any], what: str) -> None:
    _run(lambda: start().wait(), what)


def _run(operation: Callable[[], _T], what: str) -> _T:
    try:
        return operation()
    except RuntimeError as error:
        raise RankLost(f"{what} failed: {torch_reason(error)}") from error
