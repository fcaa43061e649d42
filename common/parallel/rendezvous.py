"""How the ranks of a node find each other, within a deadline: a key-value store on rank 0. Start-up only.

The store is torch's own TCP store, whose messages cannot carry code. It listens on one address, not on all.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from common.base.errors import ConfigError, RankLost
from common.parallel.place import RankPlace
from common.parallel.torch_reason import torch_reason

_RETRY_S = 0.05
_POLL_S = 0.005


class Rendezvous:
    """Exchanges short texts among all ranks of a node, each exchange once, by name."""

    def __init__(
        self,
        place: RankPlace,
        master_address: str,
        master_port: int,
        timeout_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        """Rank 0 listens on the address (on `listener`, if given, which it takes over); the others wait for it.

        Raises: ConfigError if rank 0 cannot listen there; RankLost if it was not reachable within `timeout_s`.
        """
        self._place = place
        self._timeout_s = timeout_s
        self._where = f"{master_address}:{master_port}"
        deadline = time.monotonic() + timeout_s
        fd: int | None = None
        if place.rank == 0:
            fd = (listener or _listen(master_address, master_port)).detach()
        else:
            self._await_master(master_address, master_port, deadline)
        try:
            self._store: Store | None = TCPStore(
                master_address,
                master_port,
                is_master=place.rank == 0,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=fd,
            )
        except RuntimeError as error:
            raise self._unreachable(torch_reason(error)) from error

    def _unreachable(self, reason: object) -> RankLost:
        within = f"within {self._timeout_s:g} s ({reason})"
        return RankLost(f"{self._place}: rank 0 was not reachable at {self._where} {within}")

    def _await_master(self, address: str, port: int, deadline: float) -> None:
        while True:
            try:
                socket.create_connection((address, port), timeout=self._timeout_s).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise self._unreachable(error.strerror or error) from error
                time.sleep(_RETRY_S)

    def group_store(self, name: str) -> Store:
        """A store for one process group."""
        return PrefixStore(name, self._require_store())

    def agree(self, what: str, value: str, timeout_s: float | None = None) -> None:
        """Make sure that all ranks call this with the same `value`. Raises: see `Mesh.agree`."""
        self.exchange(what, value, must_equal=True, timeout_s=timeout_s)

    def exchange(
        self,
        what: str,
        value: str,
        ranks: list[int] | None = None,
        *,
        must_equal: bool = False,
        timeout_s: float | None = None,
    ) -> list[str]:
        """The values that all `ranks` (None: of the node) gave for `what`, in their order; `what` is used once.

        Raises: RankLost naming the ranks that gave none within the deadline; ConfigError if the values differ and `must_equal`.
        """
        me, store = self._place.rank, self._require_store()
        peers = list(range(self._place.world_size)) if ranks is None else ranks
        allowed_s = timeout_s or self._timeout_s
        deadline = time.monotonic() + allowed_s

        def await_key(rank: int, suffix: str = "") -> None:
            """Return when `rank` has set its key. Polls, because torch logs a stack trace when a wait times out."""
            while not store.check([f"{what}/{rank}{suffix}"]):
                if time.monotonic() > deadline:
                    missing = [str(peer) for peer in peers if not store.check([f"{what}/{peer}{suffix}"])]
                    who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
                    raise RankLost(f"{who} did not connect to {self._where} within {allowed_s:g} s ({what})")
                time.sleep(_POLL_S)

        values: list[str] = []
        try:
            store.set(f"{what}/{me}", value)
            for rank in peers:
                await_key(rank)
                values.append(store.get(f"{what}/{rank}").decode())
                # Checked at once: ranks that disagree on the node's size would wait for ranks that do not exist.
                if must_equal and values[-1] != value:
                    raise ConfigError(f"{what} differs among the node's ranks: {value} on {me}, {values[-1]} on {rank}")
            store.set(f"{what}/{me}/read", "")
            if me == 0:
                # Rank 0 hosts the store, which must not end before the others have read.
                for rank in peers:
                    await_key(rank, "/read")
        except RuntimeError as error:
            raise RankLost(f"{self._place}: lost rank 0 at {self._where}: {torch_reason(error)}") from error
        return values

    def _require_store(self) -> Store:
        assert self._store is not None, "closed"
        return self._store

    def close(self) -> None:
        self._store = None


def _listen(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen on {address}:{port}: {error.strerror or error}") from error
