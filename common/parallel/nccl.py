"""Collectives among ranks with a GPU each, by NCCL. Runs on ranks' engine threads.

Never run on several GPUs so far. The calls are those of gloo, but waiting for one only makes the current stream wait, so
that CUDA graphs can capture them. NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.base.errors import ConfigError
from common.parallel.gloo import GlooGroup

_SIOCGIFADDR = 0x8915


def make_nccl_group(store: Store, index: int, ranks: list[int], interface: str, timeout_s: float) -> Any:
    """The NCCL group of the `ranks`; this one is the `index`-th. NCCL itself connects at the first exchange.

    An exchange that takes longer than `timeout_s` ends the process, as the loss of a rank does.
    Raises: ConfigError where PyTorch has no NCCL.
    """
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise ConfigError("several ranks on GPUs need NCCL, which this build of PyTorch lacks")
    name = interface_name(interface)
    if name:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, index, len(ranks), options)


def interface_name(interface: str) -> str:
    """The name of a network interface given by name or by its IPv4 address; empty if no interface has that address."""
    try:
        wanted = ipaddress.ip_address(interface).packed
    except ValueError:
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if found[20:24] == wanted:
                return name
    return ""


class NcclGroup(GlooGroup):
    """The ranks of one pipeline stage on GPUs of any hosts; collectives run on the current stream."""

    def close(self) -> None:
        # `shutdown` would first finish pending collectives, which may wait for a rank that is gone.
        self._group.abort()
