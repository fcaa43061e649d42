"""The differences between prefill and decode nodes that their common start-up (`common.node.startup`) needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from common.config.service_configs import NodeConfig
from common.control.messages import Role
from common.engine.kv_transfer import OnTransferEvent, TransferEnd
from common.node.core import CoreParts, NodeCore
from common.node.plan import NodePlan
from common.node.transfers import NodeTransfers
from common.node.worker import Worker

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


class NodeRole(ABC, Generic[ConfigT]):
    """One role. Stateless; each role's module has one instance, `ROLE`, which its rank processes load by name."""

    name: Role
    config_type: type[ConfigT]
    small_batches: bool
    """Whether to make steps of few rows fast at the cost of memory."""

    @abstractmethod
    def plan(self, config: ConfigT) -> NodePlan:
        """Model, layout and device of the node. Raises: ConfigError."""

    @abstractmethod
    def transfer_end(self, worker: Worker, rank: int, incarnation: str, on_event: OnTransferEvent) -> TransferEnd:
        """The transfer end of one rank. `on_event` may be called on any thread."""

    @abstractmethod
    def core(self, plan: NodePlan, parts: CoreParts, transfers: NodeTransfers) -> NodeCore[Any]:
        """The core of the node."""
