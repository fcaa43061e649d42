"""The two roles that a node's process can have, and their differences that the common start-up (`common.node.startup`) needs.

Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from common.config.other_role import in_other_role
from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig
from common.config.sources import Resolved
from common.control.messages import Role

if TYPE_CHECKING:
    from common.engine.kv_transfer import OnTransferEvent, TransferEnd
    from common.node.core import CoreParts, NodeCore
    from common.node.plan import NodePlan
    from common.node.transfers import NodeTransfers
    from common.node.worker import Worker

CONFIGS: dict[Role, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


class NodeRole(ABC, Generic[ConfigT]):
    """One role. Stateless; each role's module has one instance, `ROLE`, which its rank processes load by name."""

    name: Role
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


def load_role(name: Role) -> NodeRole[Any]:
    """Import a role, and with it torch. By name, because neither role's package may import the other's."""
    return importlib.import_module(f"{name}_node.role").ROLE


class NodeRoles:
    """The configuration of one node in each role."""

    def __init__(self, resolved: Resolved[Any], environ: Mapping[str, str]) -> None:
        self._resolved = resolved
        self._environ = environ
        self.own: Role = resolved.config.section
        """The role of the command that started the process."""
        self.served = False
        """Whether the process has served in any role."""

    def config(self, role: Role) -> NodeConfig:
        """The node's configuration in `role`. Raises: ConfigError if it cannot have that role."""
        if role == self.own:
            return self._resolved.config
        return in_other_role(self._resolved, CONFIGS[role], self._environ)
