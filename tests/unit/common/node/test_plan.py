"""What a node is before its model is read."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.node.options import ServerOptions


@pytest.mark.parametrize("node_id", ["decode-0", "d", "kvrelay_decode.1", f"decode-{'h' * 64}-8000", "fd00::7"])
def test_node_id_of_host_and_container_names_is_taken(node_id: str) -> None:
    assert ServerOptions.of("decode", DecodeConfig(node_id=node_id)).node_id == node_id


@pytest.mark.parametrize("node_id", ["../../tmp/evil", "a b", "-x", "..", "d\n", "é", "x" * 129, ""])
def test_node_id_that_is_no_name_is_refused_before_anything_is_imported(node_id: str) -> None:
    with pytest.raises(ConfigError, match="node_id must be at most 128 characters"):
        DecodeConfig(node_id=node_id)
