"""`kvrelay admin`: inspect a cluster and drain nodes. Loads rich and nothing heavier."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from common.base.errors import DeadlineExceeded
from common.cli import flowing, run_checked
from common.config.sources import ADMIN_URL_VARIABLE
from common.tools.admin.client import AdminClient, AdminRefused, AdminUnreachable, connect

_HELP = """Inspect a running cluster (nodes, requests, routing decisions) and drain nodes.

It asks a router's admin port, and nodes at the addresses that the router knows. A cluster that the same user runs with
`kvrelay up` on this machine is found automatically. For any other, give a router's admin address with --url and the
admin token in KVRELAY_ADMIN_TOKEN.

Exit codes: 0 done, 1 not found or refused, 2 wrong usage, 3 no answer.
"""
_POLL_S = 0.25

app = typer.Typer(
    name="admin",
    help=flowing(_HELP),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", envvar=ADMIN_URL_VARIABLE, help="Admin address of a router."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the full response as JSON.")]
NodeName = Annotated[str, typer.Argument(metavar="ID", help="Node id or incarnation, or a unique prefix of it.")]


@app.command("nodes")
def nodes(url: Url = None, as_json: Json = False) -> None:
    """List all nodes that the router knows, with state, load and cache."""
    _show(url, as_json, lambda client: client.get("/nodes"), lambda show, answer: show.nodes(answer))


@app.command("node")
def node(name: NodeName, url: Url = None, as_json: Json = False) -> None:
    """Show one node, as the router sees it and as it reports itself: ranks, memory, transports, attempts in flight."""

    def fetch(client: AdminClient) -> dict[str, Any]:
        known = client.node(name)
        try:
            return {"router": known, "node": client.get("/status", base=client.address_of(known))}
        except (AdminUnreachable, AdminRefused) as error:
            return {"router": known, "node": None, "complaint": error.message}

    def render(show: Any, answer: dict[str, Any]) -> Any:
        known, says = answer["router"], answer["node"]
        if says is None:
            says = {"no answer": answer["complaint"]}
        else:
            known = {key: value for key, value in known.items() if key != "load"}  # the node's own report is newer
        return show.group(
            show.properties("as the router sees it", known), show.properties("as it reports itself", says)
        )

    _show(url, as_json, fetch, render)


@app.command("router")
def router(url: Url = None, as_json: Json = False) -> None:
    """Show the router: what it serves, its admission queue, its prefix index."""
    _show(url, as_json, lambda client: client.get("/status"), lambda show, answer: show.properties("", answer))


@app.command("requests")
def requests(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of requests.")] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List the requests of this router: running ones, then the latest finished ones."""
    _show(
        url,
        as_json,
        lambda client: client.get(f"/requests?limit={limit}"),
        lambda show, answer: show.requests(answer["requests"]),
    )


@app.command("request")
def request(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The x-kvrelay-request-id of the response, or the client's own x-request-id."
        ),
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show the story of one request: every event, its time and its reason."""
    _show(
        url,
        as_json,
        lambda client: client.get(f"/requests/{quote(request_id, safe='')}"),
        lambda show, answer: show.group(*(show.story(each) for each in answer.get("choices", [answer]))),
    )


@app.command("route")
def route(
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Prompt text.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="ID,ID,...", help="Prompt as token ids.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user message in a chat.")] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Maximum length of the answer in tokens.")
    ] = 16,
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="cache_salt of the request.")] = "",
    session: Annotated[str, typer.Option("--session", help="Session key, for the policy `session`.")] = "",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show where a request would go now, with the score of every candidate; nothing is sent to any node."""
    if (prompt is None) == (tokens is None):
        raise typer.BadParameter("give either --prompt or --tokens")
    try:
        ids = [int(token) for token in (tokens or "").split(",") if token.strip()]
    except ValueError:
        raise typer.BadParameter(f"--tokens {tokens!r} is not a list of numbers such as 5,17,3") from None
    body = {"prompt": prompt or ids, "chat": chat, "max_tokens": max_tokens, "cache_salt": cache_salt}
    body["session"] = session
    _show(url, as_json, lambda client: client.post("/route", body), lambda show, answer: show.route(answer))


@app.command("drain")
def drain(
    name: NodeName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing runs on the node.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="S", help="Maximum seconds to wait.")] = 600.0,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a node finish its requests and send it no new ones, until `undrain` or a restart of the node."""

    def act(client: AdminClient) -> dict[str, Any]:
        base = client.address_of(client.node(name))
        status = client.post("/drain", {}, base=base)
        deadline_s = time.monotonic() + timeout_s
        while wait and not status["idle"]:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{status['node_id']} is not idle after {timeout_s:g} s; it keeps draining")
            time.sleep(_POLL_S)
            status = client.get("/status", base=base)
            if not status["draining"]:
                raise AdminRefused(f"{status['node_id']} is not draining any more: undrain was called")
        return status

    _show(url, as_json, act, lambda show, status: show.cell(_drained(status)))


@app.command("undrain")
def undrain(name: NodeName, url: Url = None, as_json: Json = False) -> None:
    """Send new requests to a drained node again."""
    _show(
        url,
        as_json,
        lambda client: client.post("/undrain", {}, base=client.address_of(client.node(name))),
        lambda show, status: show.cell(f"{status['node_id']} takes new work"),
    )


def _drained(status: dict[str, Any]) -> str:
    if status["idle"]:
        return f"{status['node_id']} is drained: nothing runs there"
    attempts = status["attempts"]
    running = "its engine is in a long step" if attempts is None else f"{len(attempts)} attempts in flight"
    return f"{status['node_id']} is draining: {running}"


lora = typer.Typer(
    name="lora",
    help="Load and unload the LoRA adapters of running nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.add_typer(lora)

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
    """Load an adapter on the nodes; done when all their ranks have it."""
    body = {"name": name, "path": path}
    _on_nodes(url, as_json, node, lambda client, base: client.post("/lora/load", body, base=base))


@lora.command("unload")
def lora_unload(name: AdapterName, node: Nodes = None, url: Url = None, as_json: Json = False) -> None:
    """Unload an adapter from the nodes; requests that run finish with it."""
    body = {"name": name}
    _on_nodes(url, as_json, node, lambda client, base: client.post("/lora/unload", body, base=base))


def _on_nodes(
    url: str | None, as_json: bool, names: list[str] | None, ask: Callable[[AdminClient, str], dict[str, Any]]
) -> None:
    """Ask nodes one after the other, all of them or those named, and show what each answered."""

    def fetch(client: AdminClient) -> dict[str, Any]:
        known = [client.node(name) for name in names] if names else client.get("/nodes")["nodes"]
        return {node["node_id"]: ask(client, client.address_of(node)) for node in known}

    def render(show: Any, answer: dict[str, Any]) -> Any:
        return show.group(*(show.properties(node, says) for node, says in answer.items()))

    _show(url, as_json, fetch, render)


def _show(
    url: str | None, as_json: bool, fetch: Callable[[AdminClient], Any], render: Callable[[Any, Any], Any]
) -> None:
    """Fetch an answer with a client; print it as JSON or as `render(show, answer)`."""

    def act() -> None:
        answer = fetch(connect(url, os.environ))
        if as_json:
            print(json.dumps(answer, indent=2, ensure_ascii=False))
            return
        from common.tools.admin import show

        show.console().print(render(show, answer))

    run_checked(act)
