"""Loading adapters over the admin port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from support.fake_adapters import FakeLoader, source

from common.config.option_groups import LoraOptions
from common.control.admin_server import Call
from common.node import adapter_admin
from common.node.adapter_admin import AdapterAdmin
from common.node.adapter_table import AdapterTable


class FakeNode:
    """Answers at once, where an engine thread would."""

    def ask(self, question: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(question())
        return answer

    def adapters_changed(self, adapters: object) -> None:
        pass


def test_a_load_that_was_given_up_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that ends cancels the calls at its admin port; the ranks may answer after that."""
    monkeypatch.setattr(adapter_admin, "open_source", lambda name, *_: source(name))
    loader = FakeLoader()
    table = AdapterTable(loader)
    admin = AdapterAdmin(table, [], LoraOptions(), None, FakeNode())  # type: ignore[arg-type]

    async def main() -> None:
        load = asyncio.create_task(admin._load(Call({}, {}, {"name": "a", "path": "/a"})))
        async with asyncio.timeout(20):
            while not loader.loads:
                await asyncio.sleep(0.01)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        assert load.cancelled()

    asyncio.run(main())
    loader.finish(table)  # raised InvalidStateError
    assert loader.in_memory
