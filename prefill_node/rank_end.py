"""The sending end of a prefill node's rank other than its leader."""

from __future__ import annotations

from collections.abc import Callable

from common.node.ranks.process import TransferEnd
from common.node.worker import Worker
from kvtransfer.node_transfers import TransferOrder, apply, to_report
from kvtransfer.transports.factory import make_sender


class SendingRank(TransferEnd):
    """Carries out the leader's orders on this rank's `KVSender`."""

    def __init__(self, worker: Worker, rank: int, incarnation: str, report: Callable[[object], None]) -> None:
        self._sender = make_sender(
            worker.config, worker.storage, worker.plan.layout, rank, lambda event: report(to_report(rank, event))
        )
        self.on_blocks_final = self._sender.blocks_final

    def apply(self, order: TransferOrder) -> None:
        apply(self._sender, order)

    def close(self) -> None:
        self._sender.close()
