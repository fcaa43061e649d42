"""`kvrelay prefill`. Settles how the process shares the machine, then imports the service, and torch with it."""

from __future__ import annotations

import asyncio

from common.base.process import lasting_imports, prepare_compute, run_service
from common.cli import service_app
from common.config.options import PrefillConfig
from common.config.sources import Resolved

_HELP = """Start a prefill node: it computes prompts and relays their KV cache to decode nodes.

It computes prompts in chunks, keeps their KV as a prefix cache, and sends each layer of a chunk while it computes the
next one. It samples the first token of each answer.

[bold]Example:[/bold] kvrelay prefill --model ./Qwen2.5-0.5B-Instruct --host 10.0.0.7 --redis-url redis://10.0.0.5:6379/0
"""


def _run(resolved: Resolved[PrefillConfig]) -> None:
    config = resolved.config
    from common.cluster.redis_client import check_redis
    from common.model.config import load_model_config
    from common.model.hub import resolve_model

    asyncio.run(check_redis(config.redis_url))
    load_model_config(resolve_model(config.model))  # what is wrong is told before torch, which takes seconds
    prepare_compute(config.threads, config.nice)
    with lasting_imports():
        from common.node.ranks.launch import fork_ranks
        from prefill_node.rank import run
        from prefill_node.service import plan_of, serve

    plan = plan_of(config)
    forks = fork_ranks(config, plan, run)
    run_service(lambda: serve(config, plan, forks))


app = service_app(PrefillConfig, help=_HELP, run=_run)
