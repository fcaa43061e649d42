"""What a scrape of the router says of its nodes."""

from __future__ import annotations

from common.control.messages import ModelInfo, NodeLoad, NodeRecord, PeerRef
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.metrics import Metrics
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
    metrics.watch_nodes(lambda: known, Breakers())
    line = 'kvrelay_node_prompt_tokens_total{model_name="m",node="d0",role="decode"}'
    assert f"{line} 1e+06" in metrics.render().decode()
    known[0] = node()  # the same incarnation: the router had forgotten it
    text = metrics.render().decode()
    assert line not in text
    assert 'kvrelay_node_usable{model_name="m",node="d0",role="decode"} 0.0' in text
