"""Starts a node's process up to the import of torch. That takes seconds, so everything possible is checked before it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from common.base.errors import ConfigError
from common.base.process import lasting_imports, prepare_compute
from common.config.service_configs import NodeConfig
from common.config.sources import Resolved
from common.control.messages import Role
from common.node.roles import NodeRoles, load_role

log = logging.getLogger(__name__)

COMPILE_S = 120.0
"""Time limit for compiling native kernels at a start, if the installation has not done it. If it passes, PyTorch computes."""


def main(resolved: Resolved[Any]) -> None:
    """Set threads and niceness, import the role and with it torch, and run the node. It has the role of its command, unless an
    operator or a planner changed that of its last process.

    Raises: ConfigError if the node cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    from common.cluster.runtime_changes import forget_changed_role

    config: NodeConfig = resolved.config
    roles = NodeRoles(resolved, os.environ)
    changed = asyncio.run(_check_redis(config))
    try:
        _run(roles, changed or roles.own)
    except ConfigError as error:
        if changed not in (None, roles.own) and not roles.served:
            log.error("this node cannot be a %s node, and will be a %s node: %s", changed, roles.own, error.message)
            asyncio.run(forget_changed_role(config.redis_url, config.cluster, str(config.node_id)))
        raise


async def _check_redis(config: NodeConfig) -> Role | None:
    """Check that Redis answers. Returns the role that the node's last process had, if it was changed. Raises: ConfigError."""
    from common.cluster.redis_client import check_redis
    from common.cluster.runtime_changes import read_changed_role

    await check_redis(config.redis_url)
    if config.node_id is None:
        return None
    return await read_changed_role(config.redis_url, config.cluster, config.node_id)


def _run(roles: NodeRoles, role: Role) -> None:
    from common.kernels.native.build import build_library
    from common.model.choose import check_model
    from common.model.hub import resolve_model
    from common.model.pooling.task import find_task

    config = roles.config(role)
    path = resolve_model(config.model)
    task = find_task(path, config.task)
    if task != "generate":
        raise ConfigError(f"the model {config.model} does not generate; it {task}s, which needs prefill nodes only")
    check_model(path, config.model_impl)
    if config.device != "cuda":
        build_library(min(COMPILE_S, config.start_timeout_s / 2))
    prepare_compute(config.threads, config.nice)
    with lasting_imports():
        run_node = import_node(role)
    run_node(roles, role)


def import_node(role: Role) -> Callable[[NodeRoles, Role], None]:
    """Import all that a node of this role needs. Returns what runs it."""
    from common.node.startup import run_node

    load_role(role)
    return run_node
