"""The transfer end of a decode node's rank other than its leader."""

from __future__ import annotations

from functools import partial

from common.engine.kv_transfer import OnTransferEvent
from common.node.worker import Worker
from kvtransfer.factory import make_receiver
from kvtransfer.node_transfers import RankReceiver


def receiving_rank(worker: Worker, rank: int, incarnation: str, report: OnTransferEvent) -> RankReceiver:
    make = partial(
        make_receiver, worker.config, worker.storage, worker.plan.layout, rank, port=0, incarnation=incarnation
    )
    return RankReceiver(rank, report, make)
