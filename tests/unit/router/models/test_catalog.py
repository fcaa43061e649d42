"""Which models a router serves: those that nodes register, under which names, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from common.base.errors import BadRequest, ConfigError, NotFound, Unavailable
from common.config.service_configs import RouterConfig
from common.control.identities import Adapter, PeerRef
from common.control.messages import ModelInfo, NodeRecord, Role, Task
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.models import registered_model, served_model
from router.models.catalog import REMEMBERED_S, ModelCatalog
from router.models.served_model import LoadOptions, ServedModel

LAYOUT = KVLayout("f", KVSpec.uniform(1, 1, 16, "float32"))


@dataclass
class Folders:
    """Stands for the files of models: what was loaded, with which options, and the digests of tokenizers."""

    loaded: list[tuple[str, LoadOptions]] = field(default_factory=list[tuple[str, LoadOptions]])
    digests: dict[str, str] = field(default_factory=dict[str, str])

    def load(self, path: str, name: str | None, options: LoadOptions) -> ServedModel:
        self.loaded.append((path, options))
        shown = name or Path(path).name
        return ServedModel(
            shown,
            Path(path),
            cast("Any", None),
            64,
            100,
            frozenset(),
            tokenizer_digest=self.digests.get(path, "t-" + path),
            base=shown,
            root=shown,
            path=path,
        )


def record(
    node: str, model: str, *, started_at: float = 0.0, task: Task = "generate", role: Role = "decode", **info: Any
) -> NodeRecord:
    adapters = info.pop("adapters", [])
    about = ModelInfo(model, info.pop("path", f"/m/{model}"), 100, info.pop("max_model_len", 64), task=task, **info)
    return NodeRecord(role, PeerRef(node, node, f"tcp://{node}", []), about, LAYOUT, 10, started_at, adapters=adapters)


def play(
    monkeypatch: pytest.MonkeyPatch,
    scene: Callable[[ModelCatalog, Folders], Awaitable[None]],
    *,
    remembered_s: float = REMEMBERED_S,
    **settings: Any,
) -> None:
    """Run `scene` with a catalog of these settings, whose configured model is loaded."""
    folders = Folders(digests=settings.pop("digests", {}))
    monkeypatch.setattr(served_model, "load", folders.load)
    monkeypatch.setattr(served_model, "load_pooling", lambda info, options: folders.load(info.path, info.name, options))

    async def main() -> None:
        catalog = ModelCatalog(RouterConfig(**settings), remembered_s=remembered_s)
        try:
            await catalog.load_configured()
            await scene(catalog, folders)
        finally:
            catalog.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def listed(catalog: ModelCatalog, *names: str) -> None:
    """Wait until exactly these names are listed."""
    async with asyncio.timeout(10):
        while [model.name for model in catalog.models] != list(names):
            await asyncio.sleep(0.001)


def ids(records: list[NodeRecord]) -> list[str]:
    return [each.peer.node_id for each in records]


def test_every_registered_model_is_served_by_its_own_name_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        records = [record("a0", "a", max_model_len=60), record("b0", "b", started_at=1.0), record("a1", "a")]
        assert ids(catalog.accept(records)) == ["a0", "b0", "a1"]
        await listed(catalog, "a", "b")
        a, b = catalog.get("a"), catalog.get("b")
        assert (a.base, a.path, a.max_model_len) == ("a", "/m/a", 64), "requests go where they fit"
        assert (b.base, b.path, b.max_model_len) == ("b", "/m/b", 64)
        with pytest.raises(NotFound, match=r"'c' does not exist; this server has 'a', 'b'"):
            catalog.get("c")

    play(monkeypatch, scene)


def test_options_on_names_and_templates_are_for_the_main_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        catalog.accept([record("b0", "b"), record("a0", "a", started_at=5.0, tokenizer="t-/x/a")])
        await listed(catalog, "prod", "prod-alias", "b")
        assert (catalog.get("prod").base, catalog.get("prod-alias").root) == ("a", "prod")
        assert [(path, options.chat_template) for path, options in folders.loaded] == [("/x/a", "T"), ("/m/b", None)]

    play(monkeypatch, scene, model="/x/a", served_model_name="prod,prod-alias", chat_template="T")


def test_a_configured_model_serves_nodes_of_another_name_with_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        catalog.accept([record("n0", "renamed", tokenizer="t-/x/a")])
        await listed(catalog, "renamed")
        assert len(folders.loaded) == 1

    play(monkeypatch, scene, model="/x/a")


def test_a_request_without_a_name_gets_the_only_generating_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        embeds = record("e0", "e", task="embed", role="prefill")
        catalog.accept([embeds, record("a0", "a", started_at=1.0)])
        await listed(catalog, "a", "e")
        assert (catalog.get(None).name, catalog.default("score", "embed").name) == ("a", "e")
        assert (catalog.get("").name, catalog.model_for("", "embed").name) == ("a", "e")
        catalog.accept([embeds, record("a0", "a", started_at=1.0), record("b0", "b", started_at=2.0)])
        await listed(catalog, "a", "e", "b")
        with pytest.raises(BadRequest, match="model is required: this server has 'a', 'b'"):
            catalog.get(None)
        catalog.accept([embeds, record("b0", "b", started_at=2.0)])  # "a" is known, but nobody serves it now
        assert catalog.get(None).name == "b"

    play(monkeypatch, scene)


def test_a_request_without_a_name_gets_the_configured_model_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        catalog.accept([record("a0", "a", tokenizer="t-/x/a"), record("b0", "b")])
        await listed(catalog, "a", "b")
        assert catalog.get(None).name == "a"

    play(monkeypatch, scene, model="/x/a")


def test_a_model_without_nodes_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        a, b = record("a0", "a"), record("b0", "b", started_at=1.0)
        catalog.accept([a, b])
        await listed(catalog, "a", "b")
        catalog.accept([b])
        assert catalog.get("a").name == "a"  # the dispatcher answers 503
        catalog.accept([a, b])
        await asyncio.sleep(0.1)
        assert catalog.get("a").name == "a"
        catalog.accept([b])
        await listed(catalog, "b")
        with pytest.raises(NotFound):
            catalog.get("a")
        catalog.accept([])
        await listed(catalog)
        with pytest.raises(Unavailable, match="no node has registered a model yet"):
            catalog.get("b")

    play(monkeypatch, scene, remembered_s=0.05)


def test_another_model_is_the_main_one_when_the_main_one_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        a, b = record("a0", "a"), record("b0", "b", started_at=1.0)
        catalog.accept([a, b])
        await listed(catalog, "prod", "b")
        catalog.accept([b])
        assert catalog.get("prod").base == "a"  # the dispatcher answers 503
        async with asyncio.timeout(10):
            while not catalog.models or catalog.get("prod").base != "b":
                await asyncio.sleep(0.001)

    play(monkeypatch, scene, served_model_name="prod", chat_template="T", remembered_s=0.05)


def test_the_roles_of_a_model_are_known_as_long_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        a, pooling = record("a0", "a", role="prefill"), record("e0", "e", task="embed", role="prefill", started_at=1.0)
        catalog.accept([a, pooling])
        assert catalog.roles == [("a", "decode"), ("a", "prefill"), ("e", "prefill")]
        catalog.accept([])
        assert catalog.roles == [("a", "decode"), ("a", "prefill"), ("e", "prefill")]
        await asyncio.sleep(0.1)
        assert catalog.roles == []

    play(monkeypatch, scene, remembered_s=0.05)


def test_nodes_of_one_name_with_another_task_are_ignored_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        records = [record("a0", "a"), record("odd", "a", task="embed", role="prefill", started_at=1.0)]
        assert ids(catalog.accept(records)) == ["a0"]
        assert ids(catalog.accept(records)) == ["a0"]

    play(monkeypatch, scene)
    assert caplog.text.count("odd is ignored: its model a is for 'embed', that of an older node for 'generate'") == 1


def test_nodes_of_another_tokenizer_are_ignored_before_the_files_are_loaded_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A router that starts finds both: nothing tells it to look again when it has loaded the files of the older one."""

    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        records = [
            record("p0", "a", role="prefill", tokenizer="new"),
            record("a0", "a", started_at=1.0, tokenizer="t-/m/a"),
            record("a1", "a", started_at=2.0, tokenizer="new", max_model_len=8),
            record("a2", "a", started_at=3.0),
        ]
        assert ids(catalog.accept(records)) == ["a0", "a2"]
        await listed(catalog, "a")
        assert catalog.get("a").max_model_len == 64
        assert ids(catalog.accept(records)) == ["a0", "a2"]

    play(monkeypatch, scene)
    assert caplog.text.count("a1 is ignored: its tokenizer.json for a differs from that of a0") == 1


def test_a_shorter_context_than_that_of_other_nodes_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        records = [
            record("a0", "a"),
            record("a1", "a", max_model_len=8),
            record("p0", "a", role="prefill", max_model_len=4),
        ]
        for _ in range(2):
            assert ids(catalog.accept(records)) == ["a0", "a1", "p0"]
        await listed(catalog, "a")
        assert catalog.get("a").max_model_len == 64
        catalog.accept(records[1:])
        assert catalog.get("a").max_model_len == 8

    play(monkeypatch, scene)
    assert (
        caplog.text.count("a1 takes 8 tokens of the 64 that a0 takes: longer requests for a go to larger nodes only")
        == 1
    )


SPEC = LAYOUT.spec
FP8 = KVSpec.uniform(1, 1, 16, "float8_e4m3")


def of_kind(node: str, fingerprint: str, started_at: float, spec: KVSpec = SPEC, role: Role = "decode") -> NodeRecord:
    return replace(record(node, "a", started_at=started_at, role=role), layout=KVLayout(fingerprint, spec))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (("g", SPEC), "its fingerprint is 'g', not 'f'"),
        (("f-int8", SPEC), "its fingerprint is 'f-int8', not 'f'"),
        (("f", FP8), "its KV's dtype is 'float8_e4m3', not 'float32'"),
    ],
)
def test_nodes_that_would_answer_differently_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: tuple[str, KVSpec], said: str
) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        odd = of_kind("odd", kind[0], 2.0, kind[1])
        records = [odd, of_kind("p0", "f", 0.0, role="prefill"), of_kind("a0", "f", 1.0)]
        for _ in range(2):
            assert ids(catalog.accept(records)) == ["p0", "a0"]
        (why,) = catalog.ignored_nodes
        told = f"odd is ignored: it would answer otherwise than a0: {said}; the router's --allow-mixed-weights would use both"
        assert why == told
        again = of_kind("a0", "f", 3.0)  # a node that restarts is younger, and must not give way
        assert ids(catalog.accept([odd, again])) == ["a0"]
        assert ids(catalog.accept([odd])) == ["odd"], "nobody else serves the model now"
        assert not catalog.ignored_nodes
        assert ids(catalog.accept([odd, of_kind("a0", "f", 4.0)])) == ["odd"]

    play(monkeypatch, scene)
    assert caplog.text.count("odd is ignored") == 1


def test_other_weights_are_used_where_the_router_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        for _ in range(2):
            assert ids(catalog.accept([of_kind("a0", "f", 1.0), of_kind("a1", "g", 2.0)])) == ["a0", "a1"]
        assert not catalog.ignored_nodes

    play(monkeypatch, scene, allow_mixed_weights=True)
    assert caplog.text.count("a1 is used because of --allow-mixed-weights") == 1


def test_other_arithmetic_and_another_split_over_ranks_are_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in last bits. KV is not exchanged between the former, and a stream stays with one of them."""

    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        records = [of_kind("a0", "f-int8-amx", 1.0), of_kind("a1", "f-int8", 2.0), of_kind("a2", "f-int8-bf16", 2.0)]
        records.append(replace(records[0], layout=replace(records[0].layout, tp_size=2)))
        assert catalog.accept(records) == records

    play(monkeypatch, scene)


def test_a_model_that_cannot_be_loaded_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        catalog.accept([record("b0", "b", tokenizer="another"), record("a0", "a", started_at=1.0)])
        await listed(catalog, "a")
        with pytest.raises(Unavailable, match=r"'b' is not known yet: tokenizer.json in /m/b on this machine differs"):
            catalog.get("b")
        assert catalog.get(None).name == "a"

    play(monkeypatch, scene)


def test_files_that_could_not_be_used_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder may be mounted, or a copy finished, after the nodes have registered."""
    monkeypatch.setattr(registered_model, "RETRY_S", 0.01)

    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        catalog.accept([record("b0", "b", tokenizer="another")])
        async with asyncio.timeout(10):
            while len(folders.loaded) < 4:
                await asyncio.sleep(0.001)
        assert not catalog.models
        folders.digests["/m/b"] = "another"
        await listed(catalog, "b")
        assert not catalog.refusals

    play(monkeypatch, scene)
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 1


def test_files_on_a_mount_that_hangs_take_one_thread_however_often_nodes_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registered_model, "RETRY_S", 0.01)
    hangs, ends = threading.Event(), threading.Event()
    at_once: list[int] = []

    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        def load(path: str, name: str | None, options: LoadOptions) -> ServedModel:
            at_once.append(1)
            if len(at_once) > 1:
                hangs.set()
                ends.wait(10)
            raise ConfigError("not yet")

        monkeypatch.setattr(served_model, "load", load)
        catalog.accept([record("b0", "b")])
        assert await asyncio.to_thread(hangs.wait, 10)
        for number in range(5):
            catalog.accept([record("b0", "b"), record(f"b{number}x", "b")])
            await asyncio.sleep(0.01)
        assert len(at_once) == 2
        ends.set()

    play(monkeypatch, scene)


def test_nodes_that_register_while_files_are_loaded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Membership is reported only when it changes: what is served after loading stays until then."""
    begins, goes_on = threading.Event(), threading.Event()

    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        def load(path: str, name: str | None, options: LoadOptions) -> ServedModel:
            begins.set()
            goes_on.wait(10)
            return folders.load(path, name, options)

        monkeypatch.setattr(served_model, "load", load)

        async def registers(*records: NodeRecord) -> None:
            goes_on.clear()
            begins.clear()
            catalog.accept([record("a0", records[0].model.name)])
            await asyncio.to_thread(begins.wait, 10)
            catalog.accept(list(records))
            goes_on.set()
            await listed(catalog, records[0].model.name)

        try:
            await registers(record("a0", "a"), record("a1", "a", max_model_len=128))
            assert catalog.get("a").max_model_len == 128
            catalog.accept([])
            await listed(catalog)
            await registers(record("b1", "b", path="/m/new", tokenizer="t-/m/new"))
            assert (catalog.get("b").path, catalog.get("b").tokenizer_digest) == ("/m/new", "t-/m/new")
        finally:
            goes_on.set()

    play(monkeypatch, scene, remembered_s=0.01)


def test_adapters_are_served_by_name_with_the_weights_that_most_nodes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, other = Adapter("x", "1"), Adapter("x", "2"), Adapter("b", "3")

    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        def nodes(*adapters: list[Adapter]) -> list[NodeRecord]:
            return [
                *(record(f"a{index}", "a", adapters=each) for index, each in enumerate(adapters)),
                record("b0", "b", started_at=1.0, adapters=[other]),
            ]

        catalog.accept(nodes([old], [old], [new, other]))
        await listed(catalog, "a", "b", "x")  # an adapter named like a model is hidden by it
        found = catalog.get("x")
        assert (found.base, found.root, found.adapter) == ("a", "a", old)
        async with asyncio.timeout(10):
            while catalog.get("b").adapter is not None:  # until its files are loaded
                await asyncio.sleep(0.001)
        catalog.accept(nodes([old], [new], [new]))
        assert catalog.get("x").adapter == new
        catalog.accept(nodes([], []))
        with pytest.raises(NotFound):
            catalog.get("x")
        catalog.accept(nodes([old]))
        catalog.accept(nodes())  # its nodes are gone, but not forgotten
        assert catalog.get("x").adapter == old

    play(monkeypatch, scene)


@pytest.mark.parametrize(
    ("tokenizer", "folder", "loads"),
    [
        ("t-/m/a", "/m/a", ["/m/a"]),
        ("newer", "/m/a", ["/m/a", "/m/a"]),
        ("t-/m/b", "/m/b", ["/m/a", "/m/b"]),
    ],
    ids=["the same files", "files replaced meanwhile", "another model"],
)
def test_a_preloaded_model_is_read_once_if_its_nodes_have_the_same_files(
    monkeypatch: pytest.MonkeyPatch, tokenizer: str, folder: str, loads: list[str]
) -> None:
    async def scene(catalog: ModelCatalog, folders: Folders) -> None:
        async with asyncio.timeout(10):
            while not folders.loaded:
                await asyncio.sleep(0.001)
        assert catalog.models == []
        folders.digests[folder] = tokenizer
        catalog.accept([record("n0", "renamed", path=folder, tokenizer=tokenizer)])
        await listed(catalog, "renamed")
        assert catalog.get("renamed").path == folder
        assert [path for path, _ in folders.loaded] == loads

    play(monkeypatch, scene, preload="/m/a")


def test_a_model_that_cannot_be_preloaded_is_loaded_when_its_node_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def fails(path: str, *_: object) -> ServedModel:
        tries.append(path)
        raise ConfigError("no such folder")

    async def main() -> None:
        monkeypatch.setattr(served_model, "load", fails)
        catalog = ModelCatalog(RouterConfig(preload="/m/a"))
        await catalog.load_configured()
        async with asyncio.timeout(10):
            while not tries:
                await asyncio.sleep(0.001)
        monkeypatch.setattr(served_model, "load", Folders().load)
        catalog.accept([record("n0", "a")])
        await listed(catalog, "a")
        catalog.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert tries == ["/m/a"]
