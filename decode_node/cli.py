"""`kvrelay decode`. Importing this module does not import torch."""

from __future__ import annotations

from common.config.cli import service_app
from common.config.service_configs import DecodeConfig
from common.node.before_torch import import_node, main

_HELP = """Start a decode node: it receives KV caches and generates with continuous batching.

It prefills a prompt itself, in small chunks beside the running streams, if the prompt is too short for a relay to pay
off or no prefill node is alive.

[bold]Example:[/bold] kvrelay decode --model ./Qwen2.5-0.5B-Instruct --host 10.0.0.8 --redis-url redis://10.0.0.5:6379/0
"""


def preload() -> None:
    """Import all that the node needs, for a process that forks it."""
    import_node("decode")


app = service_app(DecodeConfig, help=_HELP, run=main)
