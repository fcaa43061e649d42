"""Formats the answers of admin ports for a terminal: dictionaries in, rich tables out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from common.base.sentences import counted

_PIPE_WIDTH = 240
"""Width of output that is not a terminal, unless COLUMNS is set."""
_STATES = {"usable": "green", "draining": "yellow", "not answering": "red"}


def console() -> Console:
    """A console for standard output; colours in a terminal only. Its width is the window's, or COLUMNS."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked) > 0:
        width = int(asked)
    else:
        width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False)


class Fitted:
    """A table that leaves out columns, the last of `optional` first, until its rows fit in one line each."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], optional: Sequence[str], title: str = "") -> None:
        """rows: at least one, each with all columns by their names."""
        self._rows, self._optional, self._title = rows, optional, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = len(self._optional)
        made = self._without(self._optional[shown:])
        while shown and Measurement.get(console, options.update(width=1000), made).maximum > options.max_width:
            shown -= 1
            made = self._without(self._optional[shown:])
        yield made
        if left_out := self._optional[shown:]:
            yield Text(f"not shown for want of width: {', '.join(left_out)}", "dim")

    def _without(self, left_out: Sequence[str]) -> Table:
        columns = [name for name in self._rows[0] if name not in left_out]
        return table(self._title, columns, [[row[name] for name in columns] for row in self._rows])


def cell(value: Any) -> Text:
    """A value as text without control characters: what a service reports cannot style or steer the terminal."""
    if value is None or value == "":
        return Text("-", "dim")
    if isinstance(value, float):
        value = f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}".rstrip("0").rstrip(".")
    return Text("".join(char if char.isprintable() or char == "\n" else "?" for char in str(value)))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numeric: bool = True) -> Table:
    """A plain table. If `numeric`, columns of numbers are right-aligned. Cells that are already `Text` stay as they are."""
    data = [list(row) for row in rows]
    made = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    made.show_header = any(columns)
    for index, name in enumerate(columns):
        numbers = numeric and bool(data) and all(_is_number(row[index]) for row in data)
        made.add_column(name, justify="right" if numbers else "left", no_wrap=index == 0, overflow="fold")
    for row in data:
        made.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value[:1].isdigit())


def nodes(answer: Mapping[str, Any]) -> RenderableType:
    """`kvrelay admin nodes`."""
    rows = [_node_row(node) for node in answer["nodes"]]
    # The role stays: the id of a node that has changed it names an earlier one.
    optional = ("KV used", "hits", "queued tokens", "relayed", "model", "adapters", "cached")
    return Fitted(rows, optional) if rows else cell("the router knows no node")


def _node_row(node: Mapping[str, Any]) -> dict[str, Any]:
    load = node["load"]
    blocks = load["kv_blocks_total"]
    age_s = node["answered_s_ago"]
    return {
        "node": node["node_id"],
        "role": node["role"],
        "model": node["model"],
        "adapters": ", ".join(node["adapters"]),
        "state": _state(node),
        "running": load["running"],
        "waiting": load["waiting"],
        "queued tokens": load["queued_tokens"],
        "KV used": percent(load["kv_blocks_used"], blocks),
        "cached": percent(load["kv_blocks_cached"], blocks),
        "hits": percent(load["prefix_hits"], load["prefix_queries"]),
        "relayed": size(load["relayed_bytes"]),
        "answered": None if age_s is None else ago(age_s),
    }


def _state(node: Mapping[str, Any]) -> Text:
    """State of a node, and of its circuit breaker unless closed."""
    state, breaker = str(node["state"]), node.get("breaker", {}).get("state", "closed")
    if breaker != "closed":
        state += f", breaker {breaker.replace('_', '-')}"
    return Text(cell(state).plain, _STATES.get(state, "yellow"))


def requests(summaries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """`kvrelay admin requests`."""
    rows = [_request_row(summary) for summary in summaries]
    optional = ("decode", "tokens in", "out", "prefill", "attempts", "cached")
    return Fitted(rows, optional) if rows else cell("no request yet")


def _request_row(summary: Mapping[str, Any]) -> dict[str, Any]:
    decision: dict[str, Any] = summary["last_decision"] or {}
    usage: dict[str, Any] = summary["usage"] or {}
    prefill = decision.get("prefill", {}).get("node") or (decision and "local")
    return {
        "request": summary["request_id"],
        "arrived": ago(time.time() - summary["arrived_at"]),
        "outcome": summary["outcome"],
        "seconds": round(summary["duration_s"], 3),
        "attempts": summary["attempts"],
        "prefill": prefill or None,
        "decode": decision.get("decode", {}).get("node"),
        "tokens in": usage.get("prompt_tokens"),
        "cached": usage.get("cached_tokens"),
        "out": usage.get("completion_tokens"),
    }


def story(about: Mapping[str, Any]) -> RenderableType:
    """`kvrelay admin request`: one event per line."""
    arrived = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["arrived_at"]))
    title = f"{about['request_id']}, arrived {arrived}, {about['outcome']} after {about['duration_s']:.3f} s"
    rows = [
        [f"{event['t_s']:.4f}", event["event"], event["reason"], _compact(event["data"])] for event in about["events"]
    ]
    parts: list[RenderableType] = [table(title, ("seconds", "event", "reason", "with"), rows)]
    if about["events_omitted"]:
        parts.append(Text(f"left out in the middle: {counted(about['events_omitted'], 'event')}", "dim"))
    return Group(*parts)


def _compact(data: Any) -> str:
    """Nested dictionaries in one readable line."""
    if isinstance(data, Mapping):
        members = cast("Mapping[str, Any]", data)
        return ", ".join(f"{key}: {_compact(value)}" for key, value in members.items() if value is not None)
    if isinstance(data, list):
        return " ".join(map(_compact, cast("list[Any]", data)))
    return "" if data is None else str(data)


_ROUTE_COLUMNS = ("node", "picked", "score", "hit_tokens", "avoided", "waiting", "running", "in_flight", "backlog")


def route(answer: Mapping[str, Any]) -> RenderableType:
    """`kvrelay admin route`: the decision, then every candidate of both roles with its score."""
    plain = {key: value for key, value in answer.items() if key not in ("prefill", "decode")}
    parts = [properties("", plain)]
    for role in ("prefill", "decode"):
        rows = [{key: row[key] for key in _ROUTE_COLUMNS if key in row} for row in answer[role]]
        parts.append(records(f"{role} nodes, best first", rows))
    return Group(*parts)


_BAR = 24


def blocks(answer: Mapping[str, Any]) -> RenderableType:
    """`kvrelay admin blocks`: nodes with the most leading blocks first."""
    whole = answer["prompt_blocks"]
    nodes = sorted(answer["nodes"], key=lambda node: (-node["blocks"], node["node"]))
    rows = [[node["node"], node["role"], f"{node['blocks']} of {whole}", _bar(node["blocks"], whole)] for node in nodes]
    title = f"{counted(answer['prompt_tokens'], 'token')}, {counted(whole, 'block')}; a node holds the first ones"
    return table(title, ("node", "role", "blocks", ""), rows) if rows else cell("no node is usable")


def _bar(part: int, whole: int) -> Text:
    filled = -(-_BAR * part // whole) if whole else 0
    return Text("#" * filled + "." * (_BAR - filled))


def overview(
    router: Mapping[str, Any], known: Mapping[str, Any], running: Sequence[Mapping[str, Any]]
) -> RenderableType:
    """`kvrelay admin watch`: the router in one line, its nodes, its running requests."""
    counts = ", ".join(
        f"{router[f'requests_{name}']} {name.replace('_', ' ')}" for name in ("running", "waiting", "held_back")
    )
    line = f"{time.strftime('%H:%M:%S')}  requests: {counts}; Redis: {router['redis']}"
    return Group(cell(line), nodes(known), requests(running) if running else cell("no request runs"))


def findings(answer: Mapping[str, Any]) -> RenderableType:
    """`kvrelay admin check`: each finding and, below it, its remedy."""
    checked = f"asked were {counted(answer['routers'], 'router')} and {counted(answer['nodes'], 'node')}"
    if not answer["findings"]:
        return cell(f"nothing found; {checked}")
    lines: list[RenderableType] = []
    for finding in answer["findings"]:
        lines += [cell(f"{finding['where']}: {finding['what']}"), Padding(cell(finding["remedy"]), (0, 0, 0, 4))]
    return Group(*lines, cell(f"{counted(len(answer['findings']), 'finding')}; {checked}"))


def properties(title: str, about: Mapping[str, Any]) -> RenderableType:
    """Show any dictionary: its values in two columns, then each list of dictionaries as a table."""
    flat = [(key, value) for key, value in _flat(about) if not _is_rows(value)]
    parts: list[RenderableType] = [
        table(title, ("", ""), [(key, _one_line(value)) for key, value in flat], numeric=False)
    ]
    parts += [records(key, value) for key, value in _flat(about) if _is_rows(value)]
    return Group(*parts)


_ONLY_WHOLE = {
    *("incarnation", "fingerprint", "tokenizer", "data_addresses", "control_address", "steps_by_tokens"),
    *("index_blocks", "routing", "breaker", "usable"),
}
"""What `kvrelay admin node` shows with `--all` only."""


def node(known: Mapping[str, Any], says: Mapping[str, Any]) -> RenderableType:
    """`kvrelay admin node` on one screen: without zeros, empty values, `_ONLY_WHOLE` and what both say. A breaker that is not
    closed is shown."""
    breaker = {} if known.get("breaker", {}).get("state", "closed") == "closed" else {"breaker": known["breaker"]}
    as_seen = {key: value for key, value in known.items() if key not in _ONLY_WHOLE} | breaker
    twice = {"layout", *(key for key, value in says.items() if known.get(key) == value)}
    own = {key: value for key, value in says.items() if key not in _ONLY_WHOLE | twice}
    return Group(_brief("as the router sees it", as_seen), _brief("as it reports itself", own), cell("more: --all"))


def _brief(title: str, about: Mapping[str, Any]) -> RenderableType:
    """`properties` with one line for each dictionary, without zeros."""
    rows: list[tuple[str, Any]] = []
    for key, value in about.items():
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            flat = _flat({name: each for name, each in members.items() if each and name not in _ONLY_WHOLE})
            line = ", ".join(f"{name} {cell(_one_line(shown))}" for name, shown in flat)
            rows.append((key.replace("_", " "), line))
        elif not _is_rows(value):
            name, shown = _with_unit(key, value)
            rows.append((name.replace("_", " "), _one_line(shown)))
    tables = [records(key, value) for key, value in about.items() if _is_rows(value)]
    return Group(table(title, ("", ""), [row for row in rows if row[1] and row[1] != "no"], numeric=False), *tables)


_FIRST_COLUMNS = 3
"""Columns of records that are shown at any width."""


def records(title: str, rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A list of dictionaries as a table whose columns are their keys, as many as fit."""
    if not rows:
        return Text(f"{title}: none", "dim")
    names = {key: key.replace("_", " ") for row in rows for key in row}
    shown = [{name: _one_line(row.get(key)) for key, name in names.items()} for row in rows]
    return Fitted(shown, list(names.values())[_FIRST_COLUMNS:], title)


def _flat(about: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in about.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{key.replace('_', ' ')}: ")
        else:
            name, shown = _with_unit(key, value)
            yield prefix + name.replace("_", " "), shown


def _with_unit(key: str, value: Any) -> tuple[str, Any]:
    """A value with the unit that its name has, and the name without it; a time as how long ago it was."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return key, value
    for ending, unit in (("_s_ago", "s ago"), ("_s", "s")):
        if key.endswith(ending):
            return key.removesuffix(ending), f"{cell(value)} {unit}"
    if key.endswith("_bytes"):
        return key.removesuffix("_bytes"), size(int(value))
    return (key.removesuffix("_at"), ago(time.time() - value)) if key.endswith("_at") else (key, value)


def _is_rows(value: Any) -> bool:
    return (
        isinstance(value, list) and value != [] and all(isinstance(item, Mapping) for item in cast("list[Any]", value))
    )


def _one_line(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[Any]", value)))
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {item}" for key, item in cast("Mapping[str, Any]", value).items())
    return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value


def ago(seconds: float) -> str:
    """How long ago something was, for example 3.2 s ago or 12 min ago."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.1f} s ago"


def percent(part: int, whole: int) -> str | None:
    """The share in percent, for example 12.5 %; None if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else None


def size(count: int) -> str:
    """Bytes in a suitable unit."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
