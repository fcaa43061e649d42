"""Listeners use one address only: links between ranks and relays carry neither encryption nor authentication."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from pathlib import Path
from typing import Any

from support import transports
from support.transfer_harness import DEADLINE_S

from common.engine.kv_transfer import SourceReleased
from common.parallel.connect import connect_mesh
from common.parallel.place import RankPlace

_LISTENS = "0A"


def listening() -> set[str]:
    """The addresses on which this process listens for TCP."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found: set[str] = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in own:
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(str(ipaddress.ip_address(packed)))
    return found


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_listening_finds_a_socket_on_every_interface() -> None:
    for address in ("0.0.0.0", "::"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family):
            assert address in listening()
        assert address not in listening()


def test_relays_over_zmq_and_gloo_listen_on_their_interface_only() -> None:
    before = listening()
    for transport in (transports.zmq, transports.collective):
        with transports.clusters(transport) as make:
            cluster = make()
            transfer = cluster.transfer()
            transfer.run()
            assert cluster.senders[0].recorder.of(transfer.key, SourceReleased)
            assert listening() - before <= {"127.0.0.1"}


def test_connecting_ranks_listen_on_the_given_address_only() -> None:
    """The store, and gloo's own sockets, on a network where ranks are on several hosts."""
    before = listening()
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    meshes: list[Any] = []

    def meet(rank: int) -> None:
        meshes.append(
            connect_mesh(
                RankPlace(rank, 2),
                master_address="127.0.0.1",
                master_port=port,
                interface="127.0.0.1",
                timeout_s=DEADLINE_S,
                same_host=False,
                listener=store if rank == 0 else None,
            )
        )

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    try:
        assert len(meshes) == 2
        assert listening() - before <= {"127.0.0.1"}
    finally:
        for mesh in meshes:
            mesh.close()
