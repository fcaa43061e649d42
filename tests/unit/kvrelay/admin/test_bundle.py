"""`kvrelay admin support-bundle`: what is in the file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.admin import bundle
from router.findings import ServiceReport


@pytest.mark.parametrize("node_id", ["../../../../tmp/evil", "/tmp/evil", "..", "a/../../b"])
def test_no_node_id_leads_out_of_the_bundles_folder(monkeypatch: pytest.MonkeyPatch, node_id: str) -> None:
    def answer(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(bundle, "connect", lambda *_: SimpleNamespace(get=answer))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(
        bundle, "examine", lambda _: ([ServiceReport("r", "router")], [ServiceReport(node_id, "decode")])
    )  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(bundle, "router_urls", lambda *_: (["http://h"], "t"))  # pyright: ignore[reportUnknownLambdaType]
    names = bundle.collect(None)
    assert len(names) == 8
    assert all(not name.startswith("/") and ".." not in name.split("/") and name.count("/") < 2 for name in names)
