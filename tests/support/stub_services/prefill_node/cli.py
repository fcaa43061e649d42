"""As decode_node/cli.py."""

from __future__ import annotations

from common.config.service_configs import PrefillConfig
from decode_node.cli import node_app

app = node_app(PrefillConfig, "prefill")
