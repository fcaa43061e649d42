"""`kvrelay decode`. Settles how the process shares the machine, then imports the service, and torch with it."""

from __future__ import annotations

import asyncio

from common.base.process import lasting_imports, prepare_compute, run_service
from common.cli import service_app
from common.config.options import DecodeConfig
from common.config.sources import Resolved

_HELP = """Start a decode node: it receives KV caches and generates with continuous batching.

It prefills a prompt itself, in small chunks beside the running streams, if the prompt is too short for a relay to pay
off or no prefill node is alive.

[bold]Example:[/bold] kvrelay decode --model ./Qwen2.5-0.5B-Instruct --host 10.0.0.8 --redis-url redis://10.0.0.5:6379/0
"""


def _run(resolved: Resolved[DecodeConfig]) -> None:
    config = resolved.config
    from common.cluster.redis_client import check_redis
    from common.model.config import load_model_config
    from common.model.hub import resolve_model

    asyncio.run(check_redis(config.redis_url))
    load_model_config(resolve_model(config.model))  # what is wrong is told before torch, which takes seconds
    prepare_compute(config.threads, config.nice)
    with lasting_imports():
        from common.node.ranks.launch import fork_ranks
        from decode_node.rank import run
        from decode_node.service import plan_of, serve

    plan = plan_of(config)
    forks = fork_ranks(config, plan, run)
    run_service(lambda: serve(config, plan, forks))


app = service_app(DecodeConfig, help=_HELP, run=_run)
