"""The tables of `kvrelay admin` from recorded answers, as text. `python -m support.admin_tables` (in tests/) writes the golden
files again: read the difference before you keep it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console, RenderableType

from kvrelay.admin import show

FOLDER = Path(__file__).parent / "data" / "admin_tables"
WIDTHS = (80, 160)
ANSWERS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "admin_answers.json").read_text("utf-8"))
"""Answers of a cluster with the demo model, one running and two finished requests, and a LoRA adapter."""

_NOW_S = max(each["arrived_at"] for each in ANSWERS["requests"]["requests"]) + 90.0
_FINDINGS = {
    "routers": 1,
    "nodes": 3,
    "findings": [
        {
            "where": "decode-1",
            "what": "cannot connect to prefill-0 at tcp://10.0.0.5:7001: no connection within 0.5 s",
            "remedy": "allow the connection in the firewall; if the address is wrong, set --advertise-host of that node",
        }
    ],
}


def _node(answer: dict[str, Any]) -> RenderableType:
    return show.node({key: value for key, value in answer["router"].items() if key != "load"}, answer["node"])


def _whole_node(answer: dict[str, Any]) -> RenderableType:
    known = {key: value for key, value in answer["router"].items() if key != "load"}
    return show.Group(
        show.properties("as the router sees it", known), show.properties("as it reports itself", answer["node"])
    )


def _watch(_: Any) -> RenderableType:
    running = [each for each in ANSWERS["requests"]["requests"] if each["outcome"] == "running"]
    return show.overview(ANSWERS["router"], ANSWERS["nodes"], running)


COMMANDS: dict[str, Callable[[Any], RenderableType]] = {
    "nodes": show.nodes,
    "node": _node,
    "node all": _whole_node,
    "router": lambda answer: show.properties("", answer),
    "requests": lambda answer: show.requests(answer["requests"]),
    "request": show.story,
    "route": show.route,
    "blocks": show.blocks,
    "lora list": lambda answer: show.Group(*(show.properties(node, says) for node, says in answer.items())),
    "roll": lambda rows: show.records("restarted", rows),
    "watch": _watch,
    "check": lambda _: show.findings(_FINDINGS),
}


def rendered(command: str, width: int) -> str:
    """The command's table at this width. The caller must have stopped `show`'s clock with `clock`."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(COMMANDS[command](ANSWERS.get(command.removesuffix(" all"))))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def clock() -> Any:
    """Replaces `time` in `show`: returns the time at which the answers were recorded, in UTC."""
    return SimpleNamespace(time=lambda: _NOW_S, localtime=time.gmtime, strftime=_strftime)


def _strftime(form: str, moment: Any = None) -> str:
    return time.strftime(form, moment or time.gmtime(_NOW_S))


def golden(command: str, width: int) -> Path:
    """The file with the expected text."""
    return FOLDER / f"{command.replace(' ', '-')}-{width}.txt"


if __name__ == "__main__":
    show.time = clock()
    FOLDER.mkdir(exist_ok=True)
    for command in COMMANDS:
        for width in WIDTHS:
            golden(command, width).write_text(rendered(command, width), "utf-8")
