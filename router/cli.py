"""The command `kvrelay router`. Imports the service and the web framework only when it runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from common.base.free_memory import keep_little_free_memory
from common.base.process import lasting_imports, run_service
from common.config.cli import service_app
from common.config.service_configs import RouterConfig
from common.config.sources import Resolved

_SWITCH_S = 0.001
"""How long the event loop waits for the interpreter while a thread works on a large body."""
_HELP = """Start a router: the OpenAI-compatible HTTP address of a cluster.

It finds prefill and decode nodes in Redis, selects nodes for each request and streams the answer. It keeps no state that
must survive: run any number of routers behind a load balancer. It needs neither a GPU nor PyTorch.

[bold]Example:[/bold] kvrelay router --port 8000 --redis-url redis://10.0.0.5:6379/0 --api-key $KEY
"""


def preload() -> Callable[[RouterConfig], Coroutine[Any, Any, None]]:
    """Import all that the router needs, also for a process that forks it. Returns what serves."""
    from router.service import serve

    return serve


def _run(resolved: Resolved[RouterConfig]) -> None:
    from common.cluster.redis_client import check_redis

    asyncio.run(check_redis(resolved.config.redis_url))
    with lasting_imports():
        serve = preload()
    keep_little_free_memory()
    sys.setswitchinterval(_SWITCH_S)
    run_service(lambda: serve(resolved.config))


app = service_app(RouterConfig, help=_HELP, run=_run)
