"""Adapters without weights, and ranks that load them when the test says so."""

from __future__ import annotations

from common.base.errors import KvRelayError
from common.control.messages import Adapter
from common.node.adapter_table import AdapterLoaded, AdapterSource, AdapterTable


def source(name: str, digest: str = "00") -> AdapterSource:
    return AdapterSource(Adapter(name, digest), f"/adapters/{name}")


class FakeLoader:
    """Remembers the orders of an `AdapterTable`."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, AdapterSource]] = []
        """Not finished yet."""
        self.in_memory: set[int] = set()
        self.dropped: list[int] = []

    @property
    def num_in_memory(self) -> int:
        return len(self.in_memory) + len(self.loads)

    def load(self, adapter_id: int, source: AdapterSource) -> None:
        self.loads.append((adapter_id, source))

    def drop(self, adapter_id: int) -> None:
        self.in_memory.discard(adapter_id)
        self.dropped.append(adapter_id)

    def finish(self, table: AdapterTable, error: KvRelayError | None = None) -> None:
        """All ranks answer to the loads so far."""
        loads, self.loads = self.loads, []
        for adapter_id, _ in loads:
            if error is None:
                self.in_memory.add(adapter_id)
            table.loaded(AdapterLoaded(adapter_id, error))
