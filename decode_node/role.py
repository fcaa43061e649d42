"""The role of a decode node: configuration, plan, transfer ends and core."""

from __future__ import annotations

from dataclasses import replace

from common.config.service_configs import DecodeConfig
from common.engine.kv_transfer import OnTransferEvent, TransferEnd
from common.node.core import CoreParts
from common.node.draft_plan import plan_draft
from common.node.plan import NodePlan, plan_node
from common.node.roles import NodeRole
from common.node.transfers import NodeTransfers
from common.node.worker import Worker
from decode_node.node import DecodeNode
from kvtransfer.factory import make_end


class DecodeRole(NodeRole[DecodeConfig]):
    """Every rank listens for KV; steps are mostly one row per sequence, over pipeline stages if so configured."""

    name = "decode"
    small_batches = True

    def plan(self, config: DecodeConfig) -> NodePlan:
        plan = plan_node(
            config,
            pp_size=config.pipeline_parallel_size,
            pp_layers=config.pp_layers,
            prefill_chunk=config.local_prefill_chunk,
            speculation=config.speculation,
        )
        speculation = plan.speculation
        if speculation is None or speculation.method != "draft":
            return plan
        return replace(plan, draft=plan_draft(config, plan, speculation.model))

    def transfer_end(self, worker: Worker, rank: int, incarnation: str, on_event: OnTransferEvent) -> TransferEnd:
        plan = worker.plan
        port = plan.config.data_port if rank == 0 else 0
        return make_end(
            plan.config, worker.storage, plan.layout, rank, on_event, incarnation=incarnation, listen_port=port
        )

    def core(self, plan: NodePlan, parts: CoreParts, transfers: NodeTransfers) -> DecodeNode:
        assert isinstance(plan.config, DecodeConfig)
        return DecodeNode(parts, transfers, early_s=plan.config.lease_s, shared_cores=plan.config.shared_cores)


ROLE = DecodeRole()
