"""How the answers of admin ports look in a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from common.tools.admin import show


def known(node_id: str, incarnation: str, *, usable: bool = True) -> dict[str, Any]:
    return {"node_id": node_id, "incarnation": incarnation, "usable": usable}


def rendered(what: Any, *, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal, highlight=False)
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


def test_lists_of_dictionaries_become_tables() -> None:
    text = rendered(show.properties("about", {"a": {"b": 1.5, "c": True}, "ranks": [{"rank": 0, "pid": None}]}))
    for word in ("a: b", "1.5", "yes", "ranks", "rank", "-"):
        assert word in text, text
