"""`kvrelay admin lora`: LoRA adapters of running nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from common.base.errors import KvRelayError
from common.config.cli import command_group
from kvrelay.admin.client import AdminClient, AdminIncomplete, AdminRefused, AdminUnreachable
from kvrelay.admin.options import Json, Url, said_if_slow, say, show_answer

_KNOWN_S = 5.0
"""Time in which the router sees a change, which nodes register in Redis at once; without Redis it sees none."""
_LOAD_S = 90.0
"""Longer than a node without room for an adapter waits for one to be evicted: a minute, after which it answers with an error."""

lora = command_group("lora", "Load and unload the LoRA adapters of running nodes.")

AdapterName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter.")]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", metavar="ID", help="Only this node; may be repeated. By default every node."),
]


@lora.command("list")
def lora_list(node: Nodes = None, url: Url = None, as_json: Json = False) -> None:
    """List the adapters of each node."""
    _on_nodes(url, as_json, node, lambda client, base: client.get("/lora", base=base))


@lora.command("load")
def lora_load(
    name: AdapterName,
    path: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of the adapter, as the nodes see it.")],
    node: Nodes = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Load an adapter on the nodes; done when all their ranks have it, and the router knows it."""

    def load(client: AdminClient, base: str) -> dict[str, Any]:
        client.get("/lora", base=base)  # fails at once if the node is stopped, instead of waiting
        return client.post("/lora/load", {"name": name, "path": path}, base=base, timeout_s=_LOAD_S)

    _on_nodes(url, as_json, node, load, until=lambda names: name in names)


@lora.command("unload")
def lora_unload(name: AdapterName, node: Nodes = None, url: Url = None, as_json: Json = False) -> None:
    """Unload an adapter from the nodes; requests that run finish with it."""

    def unload(client: AdminClient, base: str) -> dict[str, Any]:
        return client.post("/lora/unload", {"name": name}, base=base)

    _on_nodes(url, as_json, node, unload, until=lambda names: name not in names)


def _on_nodes(
    url: str | None,
    as_json: bool,
    names: list[str] | None,
    ask: Callable[[AdminClient, str], dict[str, Any]],
    until: Callable[[list[str]], bool] | None = None,
) -> None:
    """Ask all nodes, or those named, at once, and show what each answered; with `until`, when it is true of the adapters that
    the router knows of each."""

    def fetch(client: AdminClient) -> dict[str, Any]:
        known = [client.node(name) for name in names] if names else client.get("/nodes")["nodes"]
        with said_if_slow("waiting: a node without room for an adapter waits up to a minute until one is not used"):
            answers, failed = client.of_each(known, lambda base: ask(client, base))
        if failed:
            raise _incomplete(answers, failed)
        if until is not None and not _router_knows(client, set(answers), until):
            say("the router does not know it yet: can the nodes and the router reach Redis?")
        return answers

    show_answer(url, as_json, fetch, lambda show, answer: show.Group(*map(show.properties, answer, answer.values())))


def _router_knows(client: AdminClient, nodes: set[str], until: Callable[[list[str]], bool]) -> bool:
    """Whether the router knows it within `_KNOWN_S`."""
    give_up_s = time.monotonic() + _KNOWN_S
    with contextlib.suppress(AdminRefused, AdminUnreachable):  # what the nodes did is done
        while time.monotonic() < give_up_s:
            known = client.get("/nodes", timeout_s=_KNOWN_S)["nodes"]
            if all(until(each["adapters"]) for each in known if each["node_id"] in nodes):
                return True
            time.sleep(0.05)
    return False


def _incomplete(answers: dict[str, Any], failed: Mapping[str, KvRelayError]) -> AdminIncomplete:
    known = {**answers, **{node: {"error": error.message} for node, error in failed.items()}}
    why = "; ".join(f"{node}: {error.message}" for node, error in failed.items())
    done = "" if len(failed) == len(known) else f"{len(answers)} of {len(known)} nodes did it; "
    return AdminIncomplete(done + why, known, max(error.exit_code for error in failed.values()))
