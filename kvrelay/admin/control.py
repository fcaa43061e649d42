"""`kvrelay admin drain`, `undrain`, `scale` and `plan`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from common.base.errors import DeadlineExceeded
from common.base.sentences import counted
from common.cluster.desired_state import shown
from kvrelay.admin.client import AdminClient, AdminRefused
from kvrelay.admin.options import Json, NodeName, Url, say, seconds_option, show_answer

_POLL_S, _SAY_S = 0.25, 5.0
_PATIENCE_S = 10.0
"""A service that is awaited and answers nothing for this long is given up."""


def drain(
    name: NodeName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing runs on the node.")] = False,
    timeout_s: Annotated[float, seconds_option("--timeout", "Maximum seconds to wait.")] = 600.0,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a node finish its requests and send it no new ones, until `undrain` or a restart of the node."""

    def act(client: AdminClient) -> dict[str, Any]:
        base = client.address_of(client.node(name))
        status = client.post("/drain", {}, base=base)
        deadline_s, said_s = time.monotonic() + timeout_s, time.monotonic()
        while wait and not status["idle"]:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{status['node_id']} is not idle after {timeout_s:g} s; it keeps draining")
            if time.monotonic() > said_s + _SAY_S:
                said_s = time.monotonic()
                say(_drained(status))
            time.sleep(_POLL_S)
            status = client.get("/status", base=base, timeout_s=_PATIENCE_S)
            if not status["draining"]:
                raise AdminRefused(f"{status['node_id']} is not draining any more: undrain was called")
        return status

    show_answer(url, as_json, act, lambda show, status: show.cell(_drained(status)))


def _pairs(counts: list[str]) -> list[tuple[str, str]]:
    return [(role, count) for role, _, count in (each.partition("=") for each in counts)]


def _parse_counts(counts: list[str]) -> list[str]:
    """Raises: BadParameter for a word that is not ROLE=COUNT, or a role with two numbers."""
    for word, (role, count) in zip(counts, _pairs(counts), strict=True):
        if not role or not count.isdecimal() or len(count) > 6:
            raise typer.BadParameter(f"{word!r} is not ROLE=COUNT, as in prefill=6")
    if len(dict(_pairs(counts))) < len(counts):
        raise typer.BadParameter("one role has two numbers")
    return counts


def undrain(name: NodeName, url: Url = None, as_json: Json = False) -> None:
    """Send new requests to a drained node again."""
    show_answer(
        url,
        as_json,
        lambda client: client.post("/undrain", {}, base=client.address_of(client.node(name))),
        lambda show, status: show.cell(f"{status['node_id']} takes new work"),
    )


def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=COUNT...", callback=_parse_counts, help="As in prefill=6 decode=2.")
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change how many nodes `kvrelay up --on ray` keeps running, or how many of each role on one machine, where nodes trade roles.

    Nodes that go, or change, finish their requests first.
    """
    show_answer(
        url,
        as_json,
        lambda client: client.post("/scale", {role: int(count) for role, count in _pairs(counts)}),
        lambda show, wanted: show.cell(f"wanted: {shown(wanted)}"),
    )


def plan(url: Url = None, as_json: Json = False) -> None:
    """Show how many nodes the planner wants, and why. The routers run with `--planner advise` or `apply`."""
    show_answer(url, as_json, lambda client: client.get("/plan"), lambda show, answer: show.properties("", answer))


def _drained(status: dict[str, Any]) -> str:
    if status["idle"]:
        return f"{status['node_id']} is drained: nothing runs there"
    attempts = status["attempts"]
    running = "its engine is in a long step" if attempts is None else f"{counted(len(attempts), 'attempt')} in flight"
    return f"{status['node_id']} is draining: {running}"
