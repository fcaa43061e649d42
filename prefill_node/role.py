"""The role of a prefill node: configuration, plan, transfer ends and core."""

from __future__ import annotations

from common.config.service_configs import PrefillConfig
from common.engine.kv_transfer import OnTransferEvent, TransferEnd
from common.node.core import CoreParts
from common.node.plan import NodePlan, plan_node
from common.node.roles import NodeRole
from common.node.transfers import NodeTransfers
from common.node.worker import Worker
from kvtransfer.factory import make_end
from prefill_node.node import PrefillNode


class PrefillRole(NodeRole[PrefillConfig]):
    """Every rank only sends, so none listens for KV; a step may be one long prompt."""

    name = "prefill"
    small_batches = False

    def plan(self, config: PrefillConfig) -> NodePlan:
        return plan_node(config, speculation=config.speculation)

    def transfer_end(self, worker: Worker, rank: int, incarnation: str, on_event: OnTransferEvent) -> TransferEnd:
        plan = worker.plan
        return make_end(plan.config, worker.storage, plan.layout, rank, on_event, incarnation=incarnation)

    def core(self, plan: NodePlan, parts: CoreParts, transfers: NodeTransfers) -> PrefillNode:
        return PrefillNode(parts, transfers)


ROLE = PrefillRole()
