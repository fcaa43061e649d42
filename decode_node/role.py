"""The role of a decode node: configuration, plan, transfer ends and core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.config.service_configs import DecodeConfig
from common.engine.kv_transfer import OnReceiverEvent, OnTransferEvent, TransferOrder
from common.node.core import CoreParts
from common.node.plan import NodePlan, plan_node
from common.node.role import NodeRole
from common.node.worker import Worker
from decode_node.node import DecodeNode
from kvtransfer.factory import make_receiver
from kvtransfer.node_transfers import NodeReceiver, RankReceiver
from kvtransfer.receiver import Receiver


class DecodeRole(NodeRole[DecodeConfig, NodeReceiver]):
    """Every rank receives; steps are mostly one row per sequence, over pipeline stages if so configured."""

    name = "decode"
    config_type = DecodeConfig
    small_batches = True

    def plan(self, config: DecodeConfig) -> NodePlan:
        return plan_node(
            config,
            pp_size=config.pipeline_parallel_size,
            pp_layers=config.pp_layers,
            prefill_chunk=config.local_prefill_chunk,
            shares_cores=config.shared_cores,
        )

    def rank_transfers(self, worker: Worker, rank: int, incarnation: str, report: OnTransferEvent) -> RankReceiver:
        return RankReceiver(rank, report, _make_local(worker, rank, incarnation, port=0))

    def node_transfers(
        self,
        worker: Worker,
        incarnation: str,
        broadcast: Callable[[TransferOrder], None],
        post: OnTransferEvent,
    ) -> NodeReceiver:
        make_local = _make_local(worker, 0, incarnation, port=worker.plan.relay.port)
        return NodeReceiver(worker.plan.world_size, broadcast, post, make_local)

    def core(self, plan: NodePlan, parts: CoreParts, transfers: NodeReceiver) -> DecodeNode:
        return DecodeNode(parts, transfers, early_s=plan.hosts.lease_s, shared_cores=plan.shares_cores)


def _make_local(worker: Worker, rank: int, incarnation: str, *, port: int) -> Callable[[OnReceiverEvent], Receiver]:
    return partial(
        make_receiver, worker.plan.relay, worker.storage, worker.plan.layout, rank, port=port, incarnation=incarnation
    )


ROLE = DecodeRole()
