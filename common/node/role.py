"""The differences between prefill and decode nodes that their common start-up (`common.node.startup`) needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from common.config.service_configs import NodeConfig
from common.control.messages import Role
from common.engine.kv_transfer import NodeTransfers, OnTransferEvent, RankTransferEnd, TransferOrder
from common.node.core import CoreParts, NodeCore
from common.node.plan import NodePlan
from common.node.worker import Worker

ConfigT = TypeVar("ConfigT", bound=NodeConfig)
TransfersT = TypeVar("TransfersT", bound=NodeTransfers)


class NodeRole(ABC, Generic[ConfigT, TransfersT]):
    """One role. Stateless; each role's module has one instance, `ROLE`, which its rank processes load by name."""

    name: Role
    config_type: type[ConfigT]
    small_batches: bool
    """Whether to make steps of few rows fast at the cost of memory."""

    @abstractmethod
    def plan(self, config: ConfigT) -> NodePlan:
        """Model, layout and device of the node. Raises: ConfigError."""

    @abstractmethod
    def rank_transfers(self, worker: Worker, rank: int, incarnation: str, report: OnTransferEvent) -> RankTransferEnd:
        """The transfer end of a rank other than the leader's. `report` may be called on any thread."""

    @abstractmethod
    def node_transfers(
        self,
        worker: Worker,
        incarnation: str,
        broadcast: Callable[[TransferOrder], None],
        post: OnTransferEvent,
    ) -> TransfersT:
        """The leader's own transfer end and its view of those of all ranks.

        `broadcast` sends an order to every other rank; `post` hands the node's events to the core.
        """

    @abstractmethod
    def core(self, plan: NodePlan, parts: CoreParts, transfers: TransfersT) -> NodeCore[Any]:
        """The core of the node."""
