"""What a scrape of the router says of its nodes."""

from __future__ import annotations

from typing import Any, cast

from common.control.messages import ModelInfo, NodeLoad, NodeRecord, PeerRef, Role
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.metrics import Metrics
from router.node_metrics import NodeCollector
from router.nodes.breaker import Breakers
from router.nodes.node import Node


def node() -> Node:
    layout = KVLayout("f" * 8, KVSpec.uniform(2, 2, 16, "float32"))
    peer = PeerRef("d0", "aa1", "tcp://127.0.0.1:1", [])
    return Node(NodeRecord("decode", peer, ModelInfo("m", "/m", 100, 64), layout, 10, 0.0))


def test_counters_of_a_node_that_is_listed_again_do_not_fall_to_0_before_it_answers() -> None:
    known = [node()]
    known[0].load = NodeLoad(kv_blocks_total=10, prompt_tokens=1_000_000)
    metrics = Metrics()
    metrics.registry.register(NodeCollector(lambda: known, Breakers(), list))
    line = 'kvrelay_node_prompt_tokens_total{model_name="m",node="d0",role="decode"}'
    assert f"{line} 1e+06" in metrics.render().decode()
    known[0] = node()  # the same incarnation: the router had forgotten it
    text = metrics.render().decode()
    assert line not in text
    assert 'kvrelay_node_usable{model_name="m",node="d0",role="decode"} 0.0' in text


def test_a_model_without_nodes_has_none_usable_as_long_as_it_is_known() -> None:
    known = [node()]
    known[0].load = NodeLoad(kv_blocks_total=10)
    roles: list[tuple[str, Role]] = [("m", "decode"), ("m", "prefill")]
    metrics = Metrics()
    metrics.registry.register(NodeCollector(lambda: known, Breakers(), lambda: roles))
    known[0].last_pong_s, known[0].link = 1.0, cast("Any", object())
    assert 'kvrelay_usable_nodes{model_name="m",role="decode"} 1.0' in metrics.render().decode()
    known.clear()
    text = metrics.render().decode()
    assert 'kvrelay_usable_nodes{model_name="m",role="decode"} 0.0' in text
    assert 'kvrelay_usable_nodes{model_name="m",role="prefill"} 0.0' in text
    roles.clear()
    assert "kvrelay_usable_nodes{" not in metrics.render().decode()
