"""The role of a prefill node: configuration, plan, transfer ends and core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.config.service_configs import PrefillConfig
from common.engine.kv_transfer import OnTransferEvent, TransferOrder
from common.node.core import CoreParts
from common.node.plan import NodePlan, plan_node
from common.node.role import NodeRole
from common.node.worker import Worker
from kvtransfer.factory import make_sender
from kvtransfer.node_transfers import NodeSender, RankSender
from prefill_node.node import PrefillNode


class PrefillRole(NodeRole[PrefillConfig, NodeSender]):
    """Every rank sends; a step may be one long prompt."""

    name = "prefill"
    config_type = PrefillConfig
    small_batches = False

    def plan(self, config: PrefillConfig) -> NodePlan:
        return plan_node(config)

    def rank_transfers(self, worker: Worker, rank: int, incarnation: str, report: OnTransferEvent) -> RankSender:
        return RankSender(
            rank, report, partial(make_sender, worker.plan.relay, worker.storage, worker.plan.layout, rank)
        )

    def node_transfers(
        self,
        worker: Worker,
        incarnation: str,
        broadcast: Callable[[TransferOrder], None],
        post: OnTransferEvent,
    ) -> NodeSender:
        make_local = partial(make_sender, worker.plan.relay, worker.storage, worker.plan.layout, 0)
        return NodeSender(worker.plan.world_size, broadcast, post, make_local)

    def core(self, plan: NodePlan, parts: CoreParts, transfers: NodeSender) -> PrefillNode:
        return PrefillNode(parts, transfers)


ROLE = PrefillRole()
