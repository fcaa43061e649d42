"""The parts that both halves of a transfer end share. Used by its I/O thread."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from common.base.clock import Clock
from common.control.messages import AttemptKey
from common.engine.kv_transfer import Traffic
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import DeferredCommands
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.copy.host import SliceCopier


class TrafficCounter:
    """Counts the bytes that each live attempt has moved, by peer rank and transport."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open: defaultdict[AttemptKey, Counter[tuple[int, str, str]]] = defaultdict(Counter)

    def add(self, key: AttemptKey, peer_rank: int, transport: str, why: str, size_bytes: int) -> None:
        """Count one message of attempt `key`."""
        self._open[key][peer_rank, transport, why] += size_bytes

    def take(self, key: AttemptKey) -> tuple[Traffic, ...]:
        """The traffic of attempt `key`, which has ended; its counters are dropped."""
        return tuple(Traffic(self._rank, *route, size) for route, size in self._open.pop(key, Counter()).items())


@dataclass(frozen=True)
class EndParts:
    """The parts that both halves of a transfer end share: copier, device, counter and clock."""

    incarnation: str
    """Incarnation of this node."""
    copier: SliceCopier | DeviceCopier
    copying: DeferredCommands
    """Messages that the device is copying, in either direction: all copies run on one stream."""
    device: CudaDevice | None
    """Holds the KV; None if that is in CPU memory."""
    traffic: TrafficCounter
    clock: Clock
