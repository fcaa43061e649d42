"""`kvrelay prefill`. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


app = service_app(PrefillConfig, help=_HELP, run=lambda resolved: main(resolved.config, _load_role))
