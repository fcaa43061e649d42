"""Loading and unloading adapters at all nodes of a model, through real admin ports of fake nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.base.errors import BadRequest, ConfigError, Forbidden, NotFound, Unavailable
from common.config.service_configs import RouterConfig
from common.control.admin_server import AdminRoute, AdminServer, Call
from common.control.identities import Adapter, PeerRef
from common.control.messages import ModelInfo, NodeRecord
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.models.adapter_control import AdapterControl

TOKEN = "a-token-of-enough-length"
LAYOUT = KVLayout("f", KVSpec.uniform(1, 1, 16, "float32"))


@dataclass
class FakeNode:
    """A node whose record lists what was loaded through its admin port."""

    name: str
    refuses: str = ""
    listed: bool = True
    record: NodeRecord = field(init=False)

    def __post_init__(self) -> None:
        self._server = AdminServer("127.0.0.1", 0, TOKEN)
        self._server.start([AdminRoute("POST", f"/lora/{name}", getattr(self, name)) for name in ("load", "unload")])
        peer = PeerRef(self.name, self.name, "tcp://127.0.0.1:1", [])
        self.record = NodeRecord(
            "decode", peer, ModelInfo("base", "", 1, 1), LAYOUT, 1, 0.0, admin_address=self._server.url
        )

    def load(self, call: Call) -> Any:
        if self.refuses:
            raise BadRequest(self.refuses)
        assert (call.body["below"], call.body["owner"]) == ("/a", "me")
        adapter = Adapter(call.body["name"], f"digest of {call.body['path']}")
        self.record = replace(self.record, adapters=[*self.record.adapters, adapter])
        return adapter._asdict()

    def unload(self, call: Call) -> Any:
        if call.body["owner"] != "me":
            raise Forbidden("it is of another client")
        gone, *_ = [each for each in self.record.adapters if each.name == call.body["name"]]
        self.record = replace(self.record, adapters=[each for each in self.record.adapters if each != gone])
        return gone._asdict()

    async def close(self) -> None:
        await self._server.close()


def play(scene: Callable[[AdapterControl, list[FakeNode]], Awaitable[None]], *, folder: str | None = "/a") -> None:
    async def main() -> None:
        nodes = [FakeNode("n0"), FakeNode("n1")]
        by_name = {node.name: node for node in nodes}
        model = SimpleNamespace(name="base", base="base", adapter=None, task="generate")
        table = SimpleNamespace(known=lambda: nodes, get=by_name.get)
        catalog = SimpleNamespace(models=[model], get=lambda _: model)
        control = AdapterControl(
            cast("Any", table), cast("Any", catalog), folder=folder, admin_token=TOKEN, tls_dir=None
        )
        try:
            await scene(control, nodes)
        finally:
            for node in nodes:
                await node.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_adapter_is_loaded_at_and_unloaded_from_every_node() -> None:
    async def scene(control: AdapterControl, nodes: list[FakeNode]) -> None:
        await control.load("x", "/a/x", None, "me")
        assert [node.record.adapters for node in nodes] == [[Adapter("x", "digest of /a/x")]] * 2
        await control.unload("x", "me")
        assert [node.record.adapters for node in nodes] == [[], []]
        with pytest.raises(NotFound, match="no LoRA adapter is named 'x'"):
            await control.unload("x", "me")
        await control.load("x", "/a/x", None, "me")
        with pytest.raises(Forbidden, match="0 of 2 nodes did it; n0: it is of another client; n1"):
            await control.unload("x", "other")
        with pytest.raises(BadRequest, match="'base' is the name of a model"):
            await control.load("base", "/a/x", None, "me")

    play(scene)


def test_nodes_that_fail_are_named() -> None:
    async def scene(control: AdapterControl, nodes: list[FakeNode]) -> None:
        nodes[1].refuses = "rank 300 is above 256"
        with pytest.raises(BadRequest, match=r"1 of 2 nodes did it; n1: rank 300 is above 256"):
            await control.load("x", "/a/x", None, "me")
        nodes[1].record = replace(nodes[1].record, admin_address="")
        with pytest.raises(Unavailable, match="n1: it has no admin port"):
            await control.load("y", "/a/y", None, "me")
        peer = replace(nodes[1].record.peer, control_address="tcp://192.0.2.7:1")
        nodes[1].record = replace(nodes[0].record, peer=peer)
        with pytest.raises(Unavailable, match="n1: its admin port listens on the loopback of its host only"):
            await control.load("z", "/a/z", None, "me")

    play(scene)


def test_without_the_option_nothing_is_loaded() -> None:
    async def scene(control: AdapterControl, nodes: list[FakeNode]) -> None:
        for call in (control.load("x", "/a/x", None, "me"), control.unload("x", "me")):
            with pytest.raises(Forbidden, match="--allow-runtime-lora"):
                await call
        assert not nodes[0].record.adapters

    play(scene, folder=None)


def test_the_option_needs_an_admin_token() -> None:
    with pytest.raises(ConfigError, match="--allow-runtime-lora needs --admin-token"):
        RouterConfig(allow_runtime_lora=True, lora_dir="/a")
    with pytest.raises(ConfigError, match="--allow-runtime-lora needs --lora-dir"):
        RouterConfig(allow_runtime_lora=True, admin_token=TOKEN)
