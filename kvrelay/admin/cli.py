"""`kvrelay admin`: inspect a cluster and drain nodes. Loads rich and nothing heavier."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from common.config.cli import command_group, flowing
from kvrelay.admin import control, prompts
from kvrelay.admin.bundle import support_bundle
from kvrelay.admin.check import check
from kvrelay.admin.client import AdminClient, AdminIncomplete, AdminRefused, AdminUnreachable
from kvrelay.admin.experts import experts
from kvrelay.admin.flip import flip
from kvrelay.admin.lora import lora
from kvrelay.admin.options import Everything, Json, NodeName, Url, check_text, show_answer
from kvrelay.admin.profile import profile
from kvrelay.admin.roll import roll
from kvrelay.admin.watch import watch

_HELP = """Inspect a running cluster (nodes, requests, routing decisions), drain nodes, restart services, load adapters.

It asks a router's admin port, and nodes at the addresses that the router knows. A cluster that the same user runs with
`kvrelay up` on this machine is found automatically. For any other, give a router's admin address with --url and the
admin token in KVRELAY_ADMIN_TOKEN.

A service that is stopped or gone is reported within two seconds.

Exit codes: 0 done, 1 not found or refused, 2 wrong usage, 3 no answer, 74 a file could not be written, 78 unusable
certificates (KVRELAY_TLS_DIR).
"""

app = command_group("admin", _HELP)


@app.command("nodes")
def nodes(url: Url = None, as_json: Json = False) -> None:
    """List all nodes that the router knows, with state, load and cache."""
    show_answer(url, as_json, lambda client: client.get("/nodes"), lambda show, answer: show.nodes(answer))


@app.command("node")
def node(name: NodeName, url: Url = None, as_json: Json = False, everything: Everything = False) -> None:
    """Show one node, as the router sees it and as it reports itself: ranks, memory, attempts in flight."""

    def fetch(client: AdminClient) -> dict[str, Any]:
        known = client.node(name)
        try:
            return {"router": known, "node": client.get("/status", base=client.address_of(known))}
        except (AdminUnreachable, AdminRefused) as error:
            answer = {"router": known, "node": None, "complaint": error.message}
            raise AdminIncomplete(error.message, answer, error.exit_code) from None

    def render(show: Any, answer: dict[str, Any]) -> Any:
        known, says = answer["router"], answer["node"]
        if says is None:
            says = {"no answer": answer["complaint"]}
        else:
            known = {key: value for key, value in known.items() if key != "load"}  # the node's own report is newer
        if not everything:
            return show.node(known, says)
        return show.group(
            show.properties("as the router sees it", known), show.properties("as it reports itself", says)
        )

    show_answer(url, as_json, fetch, render)


@app.command("router")
def router(url: Url = None, as_json: Json = False) -> None:
    """Show the router: what it serves, its admission queue, its prefix index."""
    show_answer(url, as_json, lambda client: client.get("/status"), lambda show, answer: show.properties("", answer))


@app.command("requests")
def requests(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of requests.")] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List the requests of this router: running ones, then the latest finished ones."""
    show_answer(
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
            metavar="ID",
            callback=check_text,
            help="The x-kvrelay-request-id of the response, or the client's own x-request-id.",
        ),
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show the story of one request: every event, its time and its reason."""
    show_answer(
        url,
        as_json,
        lambda client: client.get(f"/requests/{quote(request_id, safe='')}"),
        lambda show, answer: show.group(*(show.story(each) for each in answer.get("choices", [answer]))),
    )


app.command("route")(prompts.route)
app.command("blocks")(prompts.blocks)
app.command("watch")(watch)
app.command("check", help=flowing(check.__doc__ or ""))(check)
app.command("experts")(experts)
app.command("profile", help=flowing(profile.__doc__ or ""))(profile)
app.command("support-bundle", help=flowing(support_bundle.__doc__ or ""))(support_bundle)
app.command("drain")(control.drain)
app.command("undrain")(control.undrain)
app.command("scale")(control.scale)
app.command("plan")(control.plan)
app.command("flip", help=flowing(flip.__doc__ or ""))(flip)
app.command("roll", help=flowing(roll.__doc__ or ""))(roll)
app.add_typer(lora)
