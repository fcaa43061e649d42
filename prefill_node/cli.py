"""`kvrelay prefill`. Importing this module does not import torch."""

from __future__ import annotations

from common.base.process import lasting_imports, prepare_compute
from common.config.cli import service_app
from common.config.service_configs import PrefillConfig
from common.config.sources import Resolved
from common.node.before_torch import import_node, main

_HELP = """Start a prefill node: it computes prompts and relays their KV cache to decode nodes.

It computes prompts in chunks, keeps their KV as a prefix cache, and sends each layer of a chunk while it computes the
next one. It samples the first token of each answer.

[bold]Example:[/bold] kvrelay prefill --model ./Qwen2.5-0.5B-Instruct --host 10.0.0.7 --redis-url redis://10.0.0.5:6379/0
"""


def preload() -> None:
    """Import all that the node needs, for a process that forks it."""
    import_node("prefill")


def _run(resolved: Resolved[PrefillConfig]) -> None:
    from common.model.hub import resolve_model
    from common.model.pooling.task import find_task

    config = resolved.config
    path = resolve_model(config.model)
    if find_task(path, config.task) == "generate":
        main(resolved)
        return
    from common.config.pooling_options import check_options
    from common.model.pooling.encoder_config import is_encoder

    check_options(resolved, is_encoder=is_encoder(path))
    prepare_compute(config.threads, config.nice)
    with lasting_imports():
        from prefill_node.pooling_service import run_pooling_node
    run_pooling_node(config)


app = service_app(PrefillConfig, help=_HELP, run=_run)
