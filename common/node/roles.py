"""The two roles that a node's process can have. Importing this module does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.config.other_role import in_other_role
from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig
from common.config.sources import Resolved
from common.control.messages import Role

if TYPE_CHECKING:
    from common.node.role import NodeRole

_CONFIGS: dict[Role, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


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
        return in_other_role(self._resolved, _CONFIGS[role], self._environ)
