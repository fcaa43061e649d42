"""`kvrelay admin flip`: gives a node the other role, or two nodes each other's roles."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from common.base.errors import KvRelayError
from kvrelay.admin.client import AdminClient, AdminRefused, AdminUsage, pick_node
from kvrelay.admin.options import Json, StartTimeout, Url, print_answer, say, seconds_option
from kvrelay.admin.roll import ReachedCluster, poll
from kvrelay.admin.roll_plan import KnownService, node_service

_ANSWER_S = 30.0
"""Time for a node to compute what it would be in the other role."""


def flip(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...", help="Node id or incarnation, or a unique prefix of it; two nodes change places."
        ),
    ],
    timeout_s: Annotated[
        float,
        seconds_option(
            "--timeout", "Seconds for a node's requests to end; those that are left then go on at other nodes."
        ),
    ] = 600.0,
    start_timeout_s: StartTimeout = 300.0,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make a prefill node a decode node, or a decode node a prefill node, or let one of each change places.

    The node finishes its requests first. It keeps its weights and its KV if both roles need the same ranks; if not, it restarts.
    A node keeps its id and its new role, also when it restarts. The last node of a role cannot change. Of two nodes, the
    first one gets its role back if the second cannot change.
    """
    done = Flip(ReachedCluster(url), timeout_s, start_timeout_s).run(names)
    print_answer(done, as_json, lambda show, rows: show.records("changed", rows))


class Flip:
    """One transaction that changes the role of one node, or of one of each role."""

    def __init__(
        self,
        cluster: ReachedCluster,
        timeout_s: float,
        start_timeout_s: float,
        tell: Callable[[str], None] = say,
        *,
        wanted: bool = False,
    ) -> None:
        """wanted: the change follows the wanted numbers of nodes; else they change with the roles."""
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._tell = tell
        self._wanted = wanted
        self._transaction = secrets.token_hex(8)

    def run(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Change the roles of one or two nodes. Returns a row for each.

        Raises: AdminRefused, AdminUnreachable, AdminUsage, DeadlineExceeded. Then no role is changed, unless it says so.
        """
        nodes = self._cluster.nodes(self._cluster.routers()[0])
        order = in_order([node_service(pick_node(nodes, name)) for name in names], nodes)
        first = self._flip(order[0], more=len(order) > 1)
        if len(order) == 1:
            return [first]
        try:
            return [first, self._flip(order[1], more=False)]
        except KvRelayError as error:
            raise AdminRefused(f"{error.message}; {self._undo(order[0], first['is'])}") from error

    def _undo(self, node: KnownService, now: str) -> str:
        """Give a node, which has the role `now`, its old role again. Returns a sentence about it."""
        self._tell(f"{node.name} becomes a {node.role} node again")
        try:
            nodes = self._cluster.nodes(self._cluster.routers()[0])
            self._flip(node_service(pick_node(nodes, node.name)), more=False)
        except KvRelayError as error:
            return f"and {node.name} stays a {now} node: {error.message}"
        return f"{node.name} is a {node.role} node again"

    def _flip(self, node: KnownService, *, more: bool) -> dict[str, Any]:
        started_s = time.monotonic()
        routers = self._cluster.routers()
        for router in routers:
            check_others(node, self._cluster.nodes(router))
        reached, nodes = self._cluster.client(routers[0].address), self._cluster.nodes(routers[0])
        if not any(map(partial(_takes_work, reached), companions(node, nodes))):
            raise AdminRefused(
                f"all other {node.role} nodes of {node.model} drain or do not answer: {node.name} must keep its role"
            )
        address = reached.address_of(pick_node(nodes, node.incarnation))
        body = {"timeout_s": self._timeout_s, "transaction": self._transaction, "more": more, "wanted": self._wanted}
        answer = reached.post("/flip", body, base=address, timeout_s=_ANSWER_S)
        how = "" if answer["in_place"] else f", by a restart, because {answer['why']}"
        self._tell(f"{node.name}: finishes its requests and becomes a {answer['role']} node{how}")

        def find() -> str | None:
            seen = {changed(node, self._cluster.nodes(router)) for router in self._cluster.routers()}
            if seen == {None}:
                self._check_goes_on(node, address)
            return seen.pop() if len(seen) == 1 else None

        new = poll(find, self._timeout_s + self._start_timeout_s, node.name, refusal=RoleKept)
        took_s = round(time.monotonic() - started_s, 1)
        self._tell(f"{node.name}: is a {answer['role']} node after {took_s:g} s")
        return {
            "node": node.name,
            "was": node.role,
            "is": answer["role"],
            "in_place": answer["in_place"],
            "seconds": took_s,
            "before": node.incarnation,
            "now": new,
        }

    def _check_goes_on(self, node: KnownService, address: str) -> None:
        """Raises: RoleKept if the node does not drain any more, still in its old role."""
        status = self._cluster.client(address).get("/status")
        if status["incarnation"] == node.incarnation and status.get("flips_to") is None and not status["draining"]:
            raise RoleKept(f"{node.name} keeps its role: undrain was called")


class RoleKept(AdminRefused):
    """The node has its old role for good."""


def in_order(picked: Sequence[KnownService], nodes: Sequence[Mapping[str, Any]]) -> list[KnownService]:
    """The nodes in the order of their change: first the one with more companions.

    Raises: AdminUsage, AdminRefused.
    """
    for node in picked:
        if not any(each["incarnation"] == node.incarnation and each["task"] == "generate" for each in nodes):
            raise AdminRefused(f"{node.name} does not generate: it has one role only")
    if len(picked) == 2:
        if picked[0].role == picked[1].role or picked[0].model != picked[1].model:
            raise AdminUsage(
                f"{picked[0].name} and {picked[1].name} cannot change places: name a prefill and a decode node"
            )
        return sorted(picked, key=lambda node: -len(companions(node, nodes)))
    if len(picked) != 1:
        raise AdminUsage("name one node, or a prefill and a decode node that change places")
    return list(picked)


def check_others(node: KnownService, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises: AdminRefused if no other usable node has the role of `node`."""
    if not companions(node, nodes):
        raise AdminRefused(f"{node.name} is the only usable {node.role} node of {node.model}: it must keep its role")


def companions(node: KnownService, nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The other usable nodes of its role and model."""
    usable = [each for each in nodes if each["usable"] and each["incarnation"] != node.incarnation]
    return [each for each in usable if (each["role"], each["model"]) == (node.role, node.model)]


def _takes_work(reached: AdminClient, known: Mapping[str, Any]) -> bool:
    """Whether a node says itself that it does not drain. A router learns that only from the answer to its next ping."""
    try:
        return not reached.get("/status", base=reached.address_of(known))["draining"]
    except KvRelayError:
        return False


def changed(node: KnownService, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The incarnation of the node in its new role; None if it is not usable yet.

    Raises: RoleKept if it has started again in its old role.
    """
    for each in nodes:
        if each["node_id"] == node.name and each["usable"] and each["incarnation"] != node.incarnation:
            if each["role"] == node.role:
                raise RoleKept(f"{node.name} ended while it changed its role, and is a {node.role} node again")
            return str(each["incarnation"])
    return None
