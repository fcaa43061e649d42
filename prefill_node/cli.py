"""`kvrelay prefill`. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.base.process import lasting_imports, prepare_compute
from common.cli import service_app
from common.config.service_configs import PrefillConfig
from common.node.before_torch import main

if TYPE_CHECKING:
    from prefill_node.role import PrefillRole

_HELP = """Start a prefill node: it computes prompts and relays their KV cache to decode nodes.

It computes prompts in chunks, keeps their KV as a prefix cache, and sends each layer of a chunk while it computes the
next one. It samples the first token of each answer.

[bold]Example:[/bold] kvrelay prefill --model ./Qwen2.5-0.5B-Instruct --host 10.0.0.7 --redis-url redis://10.0.0.5:6379/0
"""


def _load_role() -> PrefillRole:
    from prefill_node.role import ROLE

    return ROLE


def _run(config: PrefillConfig) -> None:
    from common.model.encoder.config import pooling_task
    from common.model.hub import resolve_model

    if pooling_task(resolve_model(config.model)) is None:
        main(config, _load_role)
        return
    prepare_compute(config.threads, config.nice)
    with lasting_imports():
        from prefill_node.pooling_service import run_pooling_node
    run_pooling_node(config)


app = service_app(PrefillConfig, help=_HELP, run=lambda resolved: _run(resolved.config))
