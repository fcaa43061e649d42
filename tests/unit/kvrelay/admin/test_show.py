"""How the answers of admin ports look in a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvrelay.admin import show


def known(node_id: str, incarnation: str, *, usable: bool = True) -> dict[str, Any]:
    return {"node_id": node_id, "incarnation": incarnation, "usable": usable}


def rendered(what: Any, *, terminal: bool = False, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_text_from_a_service_cannot_control_the_terminal() -> None:
    text = rendered(show.properties("", {"name": "[red]x[/red]\x1b]0;evil\x07"}), terminal=True)
    assert "[red]x[/red]?]0;evil?" in text


def test_output_that_is_not_a_terminal_has_no_colours() -> None:
    load = {"running": 2, "waiting": 0, "queued_tokens": 0, "kv_blocks_used": 1, "kv_blocks_total": 8}
    load |= {"kv_blocks_cached": 0, "prefix_hits": 1, "prefix_queries": 4, "relayed_bytes": 1_500_000}
    row = {
        **known("d0", "aa"),
        "role": "decode",
        "model": "m",
        "adapters": ["x", "y"],
        "state": "usable",
        "answered_s_ago": 0.25,
        "load": load,
    }
    text = rendered(show.nodes({"nodes": [row]}))
    assert "\x1b" not in text
    for word in ("d0", "x, y", "usable", "12.5 %", "25.0 %", "1.5 MB", "0.2 s ago"):
        assert word in text, text
    assert "\x1b" in rendered(show.nodes({"nodes": [row]}), terminal=True)
    assert "usable, breaker half-open" in rendered(show.nodes({"nodes": [{**row, "breaker": {"state": "half_open"}}]}))


def a_node(node_id: str, role: str) -> dict[str, Any]:
    load = {"running": 12, "waiting": 3, "queued_tokens": 20_480, "kv_blocks_used": 1, "kv_blocks_total": 8}
    load |= {"kv_blocks_cached": 7, "prefix_hits": 1, "prefix_queries": 4, "relayed_bytes": 1_500_000_000}
    about = {"role": role, "model": "Qwen2.5-0.5B-Instruct", "adapters": ["sql"], "state": "usable"}
    return {**known(node_id, "aa"), **about, "answered_s_ago": 250.0, "load": load}


def test_nodes_fit_the_window_and_say_what_was_left_out() -> None:
    """The role is always there: the id of a node that has changed it names the old one."""
    answer = {"nodes": [a_node("prefill-0", "decode"), a_node("decode-10", "decode")]}
    narrow, wide = (rendered(show.nodes(answer), width=width).splitlines() for width in (80, 160))
    assert max(map(len, narrow)) <= 80
    assert max(map(len, wide)) <= 160
    assert [line.split()[:2] for line in narrow if "usable" in line] == [
        ["prefill-0", "decode"],
        ["decode-10", "decode"],
    ]
    assert all("4 min ago" in line for line in narrow if "usable" in line)
    assert any(line.startswith("not shown for want of width: ") and "model" in line for line in narrow)
    assert not any("not shown" in line for line in wide)


def test_piped_output_has_the_width_that_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("80", 80), ("", 240), ("0", 240), ("wide", 240)):
        monkeypatch.setenv("COLUMNS", columns)
        assert show.console().width == width


def test_lists_of_dictionaries_become_tables() -> None:
    text = rendered(show.properties("about", {"a": {"b": 1.5, "c": True}, "ranks": [{"rank": 0, "pid": None}]}))
    for word in ("a: b", "1.5", "yes", "ranks", "rank", "-"):
        assert word in text, text
