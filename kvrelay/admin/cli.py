"""`kvrelay admin`: inspect a cluster and drain nodes. Loads rich and nothing heavier."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from common.config.cli import command_group, flowing
from kvrelay.admin.bundle import support_bundle
from kvrelay.admin.check import check
from kvrelay.admin.client import AdminClient, AdminIncomplete, AdminRefused, AdminUnreachable
from kvrelay.admin.control import drain, plan, scale, undrain
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

Prompt = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", callback=check_text, help="Prompt text.")]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="ID,ID,...", help="Prompt as token ids.")]
Chat = Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user message in a chat.")]
Salt = Annotated[str, typer.Option("--cache-salt", callback=check_text, help="cache_salt of the request.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", callback=check_text, help="Model, where several are served.")
]


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
        tables = {"as the router sees it": known, "as it reports itself": says}
        return show.Group(*map(show.properties, tables, tables.values()))

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
        lambda show, answer: show.Group(*(show.story(each) for each in answer.get("choices", [answer]))),
    )


@app.command("route")
def route(
    prompt: Prompt = None,
    tokens: Tokens = None,
    chat: Chat = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Maximum length of the answer in tokens.")
    ] = 16,
    cache_salt: Salt = "",
    session: Annotated[
        str, typer.Option("--session", callback=check_text, help="Session key, for the policy `session`.")
    ] = "",
    model: Model = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show where a request would go now, with the score of every candidate; nothing is sent to any node."""
    body = {"prompt": _prompt(prompt, tokens), "chat": chat, "cache_salt": cache_salt, "model": model}
    body |= {"max_tokens": max_tokens, "session": session}
    show_answer(url, as_json, lambda client: client.post("/route", body), lambda show, answer: show.route(answer))


@app.command("blocks")
def blocks(
    prompt: Prompt = None,
    tokens: Tokens = None,
    chat: Chat = False,
    cache_salt: Salt = "",
    model: Model = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show how many leading KV blocks of a prompt each node holds."""
    body = {"prompt": _prompt(prompt, tokens), "chat": chat, "cache_salt": cache_salt, "model": model}
    show_answer(url, as_json, lambda client: client.post("/blocks", body), lambda show, answer: show.blocks(answer))


_IN_OTHER_FILES = (watch, check, experts, profile, support_bundle, drain, undrain, scale, plan, flip, roll)
for command in _IN_OTHER_FILES:
    app.command(help=flowing(command.__doc__ or ""))(command)
app.add_typer(lora)


def _prompt(text: str | None, tokens: str | None) -> str | list[int]:
    """The prompt of `--prompt` or `--tokens`. Raises: BadParameter."""
    if (text is None) == (tokens is None):
        raise typer.BadParameter("give either --prompt or --tokens")
    try:
        return text or [int(token) for token in (tokens or "").split(",") if token.strip()]
    except ValueError:
        raise typer.BadParameter(f"--tokens {tokens!r} is not a list of numbers such as 5,17,3") from None
