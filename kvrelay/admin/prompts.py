"""`kvrelay admin route` and `blocks`: what the router knows about a prompt. Nothing is sent to any node."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvrelay.admin.options import Json, Url, check_text, show_answer

Prompt = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", callback=check_text, help="Prompt text.")]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="ID,ID,...", help="Prompt as token ids.")]
Chat = Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user message in a chat.")]
Salt = Annotated[str, typer.Option("--cache-salt", callback=check_text, help="cache_salt of the request.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", callback=check_text, help="Model, where several are served.")
]


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
    body = _body(prompt, tokens, chat=chat, cache_salt=cache_salt, model=model)
    body |= {"max_tokens": max_tokens, "session": session}
    show_answer(url, as_json, lambda client: client.post("/route", body), lambda show, answer: show.route(answer))


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
    body = _body(prompt, tokens, chat=chat, cache_salt=cache_salt, model=model)
    show_answer(url, as_json, lambda client: client.post("/blocks", body), lambda show, answer: show.blocks(answer))


def _body(prompt: str | None, tokens: str | None, *, chat: bool, cache_salt: str, model: str | None) -> dict[str, Any]:
    if (prompt is None) == (tokens is None):
        raise typer.BadParameter("give either --prompt or --tokens")
    try:
        ids = [int(token) for token in (tokens or "").split(",") if token.strip()]
    except ValueError:
        raise typer.BadParameter(f"--tokens {tokens!r} is not a list of numbers such as 5,17,3") from None
    return {"prompt": prompt or ids, "chat": chat, "cache_salt": cache_salt, "model": model}
