"""The transfer end of a prefill node's rank other than its leader."""

from __future__ import annotations

from functools import partial

from common.engine.kv_transfer import OnTransferEvent
from common.node.worker import Worker
from kvtransfer.factory import make_sender
from kvtransfer.node_transfers import RankSender


def sending_rank(worker: Worker, rank: int, incarnation: str, report: OnTransferEvent) -> RankSender:
    return RankSender(rank, report, partial(make_sender, worker.config, worker.storage, worker.plan.layout, rank))
