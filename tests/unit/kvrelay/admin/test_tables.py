"""The tables of every command, as they look in windows of 80 and 160 columns."""

from __future__ import annotations

import pytest
from support.admin_tables import COMMANDS, WIDTHS, clock, golden, rendered

from kvrelay.admin import show


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_table_looks_as_recorded_and_fits(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "time", clock())
    text = rendered(command, width)
    assert max(map(len, text.splitlines())) <= width
    assert text == golden(command, width).read_text("utf-8")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_node_fits_on_one_screen(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "time", clock())
    assert len(rendered("node", width).splitlines()) <= 40
