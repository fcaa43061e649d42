"""Simulated nodes for routers under test: they are listed, connected and answer pings with changing loads."""

from __future__ import annotations

import random
from typing import Any

from common.control.messages import Message, ModelInfo, NodeLoad, NodeRecord, PeerRef, Pong
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.metrics import Finished
from router.requests.story import Story
from router.router import Router

_LAYOUT = KVLayout("f" * 8, KVSpec.uniform(2, 2, 16, "float32"))


class _Link:
    """A link whose messages go nowhere."""

    refused: tuple[Message, ...] = ()

    def send(self, message: Message) -> None:
        """Discard the message."""

    def close(self) -> None:
        """Nothing to close."""


class SimulatedNodes:
    """`count` nodes of a router, half of each role; `tick` changes their loads, ends some requests and relays KV."""

    def __init__(self, router: Router, count: int, seed: int = 1) -> None:
        self._router = router
        self._random = random.Random(seed)
        self._requests = 0
        table: Any = router.dispatcher.nodes
        table._open_link = lambda *_: _Link()
        roles = ["prefill" if number < count // 2 else "decode" for number in range(count)]
        self.records = [
            NodeRecord(
                "prefill" if role == "prefill" else "decode",
                PeerRef(f"{role}-{number}", f"inc-{number}", f"tcp://10.0.0.{number}:1", []),
                ModelInfo("sim", "/nowhere", 100, 4096),
                _LAYOUT,
                1000,
                0.0,
            )
            for number, role in enumerate(roles)
        ]
        table.update(self.records)
        self.tick()

    def tick(self, requests: int = 0) -> None:
        """New loads of all nodes; `requests` further requests begin and end."""
        table: Any = self._router.dispatcher.nodes
        for record in self.records:
            used, draw = self._random.randrange(600), self._random.randrange
            load = NodeLoad(
                running=draw(9), waiting=draw(3), queued_tokens=draw(4000), kv_blocks_used=used, kv_blocks_cached=draw(400),
                kv_blocks_total=1000, step_s=0.02, prefix_queries=100 * self._requests, prefix_hits=60 * self._requests,
                relayed_by={"shm": 1000},
            )  # fmt: skip
            table._receive(record.peer.incarnation, Pong(record.peer.node_id, record.peer.incarnation, load))
        for _ in range(requests):
            self._request()

    def _request(self) -> None:
        router, draw = self._router, self._random
        self._requests += 1
        prefill, decode = (
            draw.choice(self.records[: len(self.records) // 2]),
            draw.choice(self.records[len(self.records) // 2 :]),
        )
        router.dispatcher.nodes.relayed(decode.peer.incarnation, prefill.peer.incarnation, draw.randrange(10**6, 10**7))
        metrics = router.metrics.of_model("sim")
        metrics.attempt("relayed" if draw.random() < 0.8 else "local", 1)
        metrics.first_tokens(1, draw.lognormvariate(-1.5, 0.6))
        for _ in range(20):
            metrics.more_tokens(1, draw.lognormvariate(-4, 0.4))
        metrics.finished("length", Finished(500, 1.0))
        story = Story(f"chatcmpl-{self._requests:06}")
        router.dispatcher.stories.enter(story)
        story.add("arrived")
        story.add(
            "decision",
            "attempt 1",
            {"mode": "relayed", "prefill": {"node": prefill.peer.node_id}, "decode": {"node": decode.peer.node_id}},
        )
        story.add("first_token", "", {"attempt": 1, "node": prefill.peer.node_id})
        story.add(
            "finished",
            "length",
            {"prompt_tokens": 500, "completion_tokens": 21, "cached_tokens": 0, "relayed_bytes": 1},
        )
        router.dispatcher.stories.end(story)
