"""Loading adapters over the admin port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.certificates import made
from support.fake_adapters import FakeLoader, source

from common.base.errors import AdapterMissing, BadRequest, ConfigError, Forbidden
from common.cluster.records import LoadedAdapters, Records
from common.config.option_groups import LoraOptions
from common.control.admin_server import Call
from common.node import adapter_admin
from common.node.adapter_admin import AdapterAdmin, configured_sources, loaded_sources, open_source
from common.node.adapter_table import AdapterSource, AdapterTable
from common.node.options import lora_folders


def plan_of(*names: str, **options: Any) -> Any:
    """The part of a node's plan that adapters need. `names`: of its model."""
    config = LoraOptions(**options)
    return SimpleNamespace(config=config, lora_folders=lora_folders(config), model_config=None, names=names)


PLAN = plan_of()


class FakeNode:
    """Answers at once, where an engine thread would."""

    node_id = "d0"

    def __init__(self) -> None:
        self.registered: list[LoadedAdapters | None] = []

    def ask(self, question: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(question())
        return answer

    def adapters_changed(self, adapters: object, loaded: LoadedAdapters | None) -> None:
        self.registered.append(loaded)


def admin_of_files(monkeypatch: pytest.MonkeyPatch) -> tuple[AdapterAdmin, AdapterTable, FakeLoader]:
    """An admin port for which every path is that of an adapter."""
    monkeypatch.setattr(adapter_admin, "open_source", lambda name, *_, **__: source(name))
    loader = FakeLoader()
    table = AdapterTable(loader)
    admin = AdapterAdmin(table, [], [], PLAN, FakeNode())  # type: ignore[arg-type]
    return admin, table, loader


async def begun_load(admin: AdapterAdmin, loader: FakeLoader) -> asyncio.Task[Any]:
    """A call that loads adapter `a`, once the loader has it."""
    load = asyncio.create_task(admin._load(Call({}, {}, {"name": "a", "path": "/a"})))
    async with asyncio.timeout(20):
        while not loader.loads:
            await asyncio.sleep(0.01)
    return load


def test_a_load_that_was_given_up_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that ends cancels the calls at its admin port; the ranks may answer after that."""
    admin, table, loader = admin_of_files(monkeypatch)

    async def main() -> None:
        load = await begun_load(admin, loader)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        assert load.cancelled()

    asyncio.run(main())
    loader.finish(table)  # raised InvalidStateError
    assert loader.in_memory


def test_an_adapter_that_is_unloaded_and_loaded_again_while_it_is_loaded_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the first call took what the second one had registered."""
    admin, table, loader = admin_of_files(monkeypatch)

    async def main() -> list[Any]:
        first = await begun_load(admin, loader)
        table.unregister("a")
        answer: Future[int] = Future()
        admin._begin_load(source("a"), answer)
        await asyncio.gather(first, return_exceptions=True)
        loader.finish(table)
        table.settle(set(), 0.0)
        return [first.exception(), await asyncio.wrap_future(answer)]

    unloaded, adapter_id = asyncio.run(main())
    assert isinstance(unloaded, AdapterMissing)
    assert loader.in_memory == {adapter_id}
    assert table.adapters == (source("a").adapter,)


def test_only_who_loaded_an_adapter_or_an_operator_unloads_it() -> None:
    table, node = AdapterTable(), FakeNode()
    configured = source("fixed")
    for each in (configured, source("of-op"), source("a")._replace(owner="A"), source("b")._replace(owner="A")):
        table.register(each)
    missing = [source("lost")._replace(owner="B")]
    admin = AdapterAdmin(table, [configured], missing, PLAN, node)  # type: ignore[arg-type]

    async def unload(name: str, **body: Any) -> None:
        await admin._unload(Call({}, {}, {"name": name, **body}))

    async def main() -> None:
        for name, owner in (("fixed", "A"), ("of-op", "A"), ("a", "B"), ("a", ""), ("lost", "A")):
            with pytest.raises(Forbidden, match="was loaded by an operator or another client"):
                await unload(name, owner=owner)
        with pytest.raises(BadRequest, match="owner must be a text"):
            await unload("a", owner=1)
        assert not node.registered
        await unload("a", owner="A")
        assert node.registered[-1] is not None
        assert node.registered[-1].owners == [None, "A", "B"], "what is kept in Redis says whose each is"
        for name, more in (("b", {}), ("of-op", {}), ("lost", {"owner": "B"})):
            await unload(name, **more)

    asyncio.run(main())
    assert [each.adapter.name for each in table.sources] == ["fixed"]


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/x",
        "x/",
        "x/../y",
        "x\0y",
        "x\ny",
        "a b",
        "",
        ".x",
        "x//y",
        "n" * 257,
        "x\u202e",
        "%2e%2e",
        "_x",
        "x\n",
    ],
)
def test_a_name_that_is_a_path_or_not_printable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be an adapter's name"):
        open_source(name, "/a", PLAN)


@pytest.mark.parametrize("name", ["x", "org/name", "sql-v2.1", "Ünïcode_1", "a:b@c+d"])
def test_usual_names_are_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="is the name of the model"):
        open_source(name, "/a", plan_of(name))


def test_a_client_loads_only_what_lies_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors about everything else are the same, whether it exists or not."""
    opened: list[Path] = []

    def open_adapter(folder: Path, *_: object) -> Any:
        opened.append(folder)
        raise ConfigError("it was looked at")

    monkeypatch.setattr(adapter_admin, "open_adapter", open_adapter)
    top = tmp_path / "top"
    (top / "inner").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "topless").mkdir()
    (top / "link").symlink_to(tmp_path / "outside")
    (top / "inner link").symlink_to(top / "inner")
    (top / "circle").symlink_to(top / "circle")

    def said(path: str) -> str:
        with pytest.raises(ConfigError) as error:
            open_source("x", path, PLAN, below=str(top))
        return error.value.message

    refused = "lora_path must name a folder below the router's --lora-dir"
    outside = ["..", "../outside", "../nothing", "/etc", "/nothing", "~root/x/../../..", "link", "link/x", "../topless"]
    assert {said(path) for path in [*outside, str(tmp_path / "outside")]} == {refused}
    for path in ("x\0y", "circle"):
        assert "is not a folder" in said(path)
    assert not opened
    for path in ("inner", "inner/", str(top / "inner"), "inner link", "nothing"):
        assert said(path) == "it was looked at"
    assert {folder.name for folder in opened} == {"inner", "nothing"}


def test_what_failed_to_load_cannot_be_named_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    admin, table, loader = admin_of_files(monkeypatch)

    async def main() -> None:
        load = await begun_load(admin, loader)
        loader.finish(table, ConfigError("no such file"))
        with pytest.raises(BadRequest, match="no such file"):
            await load

    asyncio.run(main())
    assert table.adapters == ()


def listed(*sources: AdapterSource) -> LoadedAdapters:
    return LoadedAdapters(
        "d0", [each.adapter for each in sources], [each.path for each in sources], [each.owner for each in sources]
    )


def test_what_cannot_be_loaded_again_is_not_forgotten_until_an_operator_unloads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder may not be mounted at one start."""

    def opened(name: str, *_: object, **__: object) -> AdapterSource:
        if name == "unmounted":
            raise ConfigError("no such folder")
        return source(name, "11" if name == "changed" else "00")

    monkeypatch.setattr(adapter_admin, "open_source", opened)
    before = listed(*map(source, ("usable", "unmounted", "changed", "sql", "usable")))
    node = FakeNode()

    async def main() -> AdapterAdmin:
        configured = [source("sql", "22")]
        usable, missing = await loaded_sources(before, configured, PLAN)
        assert [each.adapter.name for each in usable] == ["usable"]
        table = AdapterTable(FakeLoader(), sources=[*configured, *usable])
        admin = AdapterAdmin(table, configured, missing, PLAN, node)  # type: ignore[arg-type]
        assert admin.loaded == listed(*map(source, ("usable", "unmounted", "changed", "sql")))
        for name in ("unmounted", "usable"):
            await admin._unload(Call({}, {}, {"name": name}))
        return admin

    asyncio.run(main())
    assert node.registered[-1] == listed(*map(source, ("changed", "sql")))


def test_what_could_not_be_read_is_left_as_it_is() -> None:
    admin = AdapterAdmin(AdapterTable(FakeLoader()), [], None, PLAN, FakeNode())  # type: ignore[arg-type]
    assert admin.loaded is None
    assert Records("c", None).decode_loaded(b"junk", "d0") is None
    records = Records("c", str(made() / "node"))
    written = records.encode_loaded(listed(source("a")))
    assert records.decode_loaded(written, "d0") == listed(source("a"))
    assert records.decode_loaded(written, "d1") is None, "of another node"
    assert records.decode_loaded(Records("c", None).encode_loaded(listed(source("a"))), "d0") is None, "not signed"


@pytest.mark.parametrize("path", ["~nouser/x", "/no/such/folder"])
def test_a_path_that_is_no_folder_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        adapter_admin.open_source("a", path, PLAN)


def test_an_adapter_cannot_have_the_name_of_the_model() -> None:
    """Requests for it would be answered by the model without it."""
    named = "'base' is the name of the model"
    with pytest.raises(ConfigError, match=named):
        configured_sources(plan_of("base", lora="base=/a"))
    table = AdapterTable(FakeLoader())
    admin = AdapterAdmin(table, [], [], plan_of("base"), FakeNode())  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=named):
        asyncio.run(admin._load(Call({}, {}, {"name": "base", "path": "/a"})))
    assert table.adapters == ()
