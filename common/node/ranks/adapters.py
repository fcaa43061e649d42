"""LoRA adapters on a node's ranks: every rank reads its part on a thread of its own, while steps go on.

A step names adapters by ids that are never used twice, and only after all ranks have loaded them; an order to drop one
comes between steps. So ranks need not agree on when an adapter is swapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.base.errors import ConfigError, KvRelayError
from common.model.config import ModelConfig
from common.model.lora.adapters import Adapters
from common.model.lora.checkpoint import open_adapter
from common.node.adapter_table import AdapterLoaded, AdapterSource
from common.node.ranks.messages import DropAdapter, LoadAdapter, RankLoadedAdapter, RankOrder


class RankAdapters:
    """One rank's adapters. `report` may be called on any thread."""

    def __init__(
        self, adapters: Adapters, config: ModelConfig, rank: int, report: Callable[[RankLoadedAdapter], None]
    ) -> None:
        self._adapters = adapters
        self._config = config
        self._rank = rank
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def load(self, order: LoadAdapter) -> None:
        """Load an adapter beside the steps, then report. Any thread."""
        self._thread.submit(self._load, order)

    def drop(self, adapter_id: int) -> None:
        """Free an adapter's memory. Called between steps."""
        self._adapters.drop(adapter_id)

    def close(self) -> None:
        """End the thread after what it loads now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, order: LoadAdapter) -> None:
        error = ""
        try:
            self._adapters.load(order.adapter_id, open_adapter(Path(order.path), self._config), order.digest)
        except KvRelayError as failure:
            error = failure.message
        except Exception as failure:  # whatever it is, the leader waits for an answer
            error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
        self._report(RankLoadedAdapter(self._rank, order.adapter_id, error))


class NodeAdapters:
    """`AdapterLoader` over all ranks of a node: the leader's own and, by orders, the others'."""

    def __init__(
        self,
        adapters: Adapters,
        config: ModelConfig,
        world_size: int,
        broadcast: Callable[[RankOrder], None],
        post: Callable[[AdapterLoaded], None],
    ) -> None:
        """`broadcast` sends an order to every other rank; `post` hands events to the core."""
        self._own = RankAdapters(adapters, config, 0, self.on_report)
        self._world_size = world_size
        self._broadcast = broadcast
        self._post = post
        self._lock = threading.Lock()
        self._answers: dict[int, list[str]] = {}
        """Errors of the ranks that have answered, by adapter id; empty ones are successes."""

    def load(self, adapter_id: int, source: AdapterSource) -> None:
        order = LoadAdapter(adapter_id, source.path, source.adapter.digest)
        self._answers[adapter_id] = []
        self._broadcast(order)
        self._own.load(order)

    def drop(self, adapter_id: int) -> None:
        self._broadcast(DropAdapter(adapter_id))
        self._own.drop(adapter_id)

    def on_report(self, report: RankLoadedAdapter) -> None:
        """A rank has answered. Any thread."""
        with self._lock:
            answers = self._answers[report.adapter_id]
            answers.append(f"rank {report.rank}: {report.error}" if report.error else "")
            if len(answers) < self._world_size:
                return
            del self._answers[report.adapter_id]
        failed = [answer for answer in answers if answer]
        self._post(AdapterLoaded(report.adapter_id, ConfigError(failed[0]) if failed else None))

    def close(self) -> None:
        """End the leader's thread."""
        self._own.close()
