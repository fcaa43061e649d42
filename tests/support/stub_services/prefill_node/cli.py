"""As decode_node/cli.py."""

from __future__ import annotations

from common.config.service_configs import PrefillConfig
from decode_node.cli import node_app, preload

__all__ = ["app", "preload"]

app = node_app(PrefillConfig, "prefill")
