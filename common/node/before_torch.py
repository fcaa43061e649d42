"""Starts a node's process up to the import of torch. That takes seconds, so everything possible is checked before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.base.errors import ConfigError
from common.base.process import lasting_imports, prepare_compute
from common.config.service_configs import NodeConfig

if TYPE_CHECKING:
    from common.node.role import NodeRole

COMPILE_S = 120.0
"""Time limit for compiling native kernels at a start, if the installation has not done it. If it passes, PyTorch computes."""


def main(config: NodeConfig, load_role: Callable[[], NodeRole[Any]]) -> None:
    """Set threads and niceness, import the role and with it torch, and run the node.

    Raises: ConfigError if the node cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    from common.cluster.redis_client import check_redis
    from common.kernels.native.build import build_library
    from common.model.choose import check_model
    from common.model.hub import resolve_model
    from common.model.pooling.task import find_task

    asyncio.run(check_redis(config.redis_url))
    path = resolve_model(config.model)
    task = find_task(path, config.task)
    if task != "generate":
        raise ConfigError(f"the model {config.model} does not generate; it {task}s, which needs prefill nodes only")
    check_model(path, config.model_impl)
    if config.device != "cuda":
        build_library(min(COMPILE_S, config.start_timeout_s / 2))
    prepare_compute(config.threads, config.nice)
    with lasting_imports():
        run_node, role = import_node(load_role)
    run_node(role, config)


def import_node(
    load_role: Callable[[], NodeRole[Any]],
) -> tuple[Callable[[NodeRole[Any], Any], None], NodeRole[Any]]:
    """Import all that a node needs. Returns what runs it, and its role."""
    from common.node.startup import run_node

    return run_node, load_role()
