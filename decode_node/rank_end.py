"""The receiving end of a decode node's rank other than its leader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.engine.kv_transfer import ReceiverEvent
from common.node.address import advertised
from common.node.ranks.process import TransferEnd
from common.node.worker import Worker
from kvtransfer.node_transfers import Open, Opened, TransferOrder, apply, to_report
from kvtransfer.transports.factory import make_receiver


class ReceivingRank(TransferEnd):
    """Carries out the leader's orders on this rank's `KVReceiver`."""

    def __init__(self, worker: Worker, rank: int, incarnation: str, report: Callable[[object], None]) -> None:
        self._rank = rank
        self._report = report
        self._lock = threading.Lock()
        self._receiver = make_receiver(
            worker.config,
            worker.storage,
            worker.plan.layout,
            rank,
            self._on_event,
            port=0,
            incarnation=incarnation,
        )
        self.data_address = advertised(self._receiver.address, worker.config)

    def apply(self, order: TransferOrder) -> None:
        with self._lock:  # what comes of opening is reported after the opening
            apply(self._receiver, order)
            if isinstance(order, Open) and order.incoming is not None:
                self._report(to_report(self._rank, Opened(order.incoming.key)))

    def _on_event(self, event: ReceiverEvent) -> None:
        with self._lock:
            self._report(to_report(self._rank, event))

    def close(self) -> None:
        self._receiver.close()
