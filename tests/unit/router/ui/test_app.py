"""The dashboard's application: headers, pages, where it is served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import router.ui.app as app_module
from common.control.admin_server import build
from router.http.client import client_of
from router.ui.access import ACTION_HEADER, Access
from router.ui.app import dashboard, json_response

TOKEN = "secret-token"


async def _answer(request: Request) -> Response:
    return json_response({"path": request.url.path})


async def _endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    answer = json_response({"path": scope["path"], "client": client_of(scope).name, "body": (await receive())["body"]})
    await answer(scope, receive, send)


def _get(access: Access, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> httpx.Response:
    routes = [Route("/thing", _answer), Route("/act", _answer, methods=["POST"])]
    app = build([], TOKEN, {"/ui": dashboard(access, routes, lambda: _endpoint)})

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:80") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def test_pages_carry_a_strict_policy_and_load_nothing_from_elsewhere() -> None:
    answer = _get(Access(), "/ui/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    for file in (Path(app_module.__file__).parent / "static").rglob("*.*"):
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not any(word in text for word in ('src="http', "src=http", "import(", "url(http", "@import", "eval(")), (
            file
        )


def test_the_admin_port_shows_pages_to_all_and_data_to_those_with_the_token() -> None:
    access = Access(TOKEN, open=False)
    assert _get(access, "/ui/style.css").status_code == 200
    assert _get(access, "/ui/api/thing").status_code == 401
    assert _get(access, "/ui/api/thing", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert _get(access, "/uix").status_code == 401


def test_actions_need_a_page_of_this_site_and_the_token_or_a_trusted_local_caller() -> None:
    page, token = {ACTION_HEADER: "1"}, {"authorization": f"Bearer {TOKEN}"}
    status: Callable[..., int] = lambda access, headers: _get(access, "/ui/api/act", "POST", headers).status_code  # noqa: E731
    assert status(Access(TOKEN), page | token) == 200
    assert status(Access(TOKEN), page) == 401
    assert status(Access(TOKEN), token) == 403
    assert status(Access(TOKEN), page | token | {"origin": "http://elsewhere.example"}) == 403
    assert status(Access(TOKEN), page | token | {"sec-fetch-site": "cross-site"}) == 403
    assert status(Access(""), page | {"authorization": "Bearer "}) == 401
    assert status(Access(TOKEN, trusts_loopback=True), page) == 200
    assert status(Access(TOKEN, trusts_loopback=True), page | {"host": "rebound.example"}) == 401
    assert status(Access(TOKEN, trusts_loopback=True), page | {"x-forwarded-for": "192.0.2.1"}) == 401


def test_a_conversation_needs_a_page_of_this_site_and_on_the_admin_port_the_token() -> None:
    page, token = {ACTION_HEADER: "1"}, {"authorization": f"Bearer {TOKEN}"}
    status: Callable[..., int] = lambda access, headers: _get(access, "/ui/api/chat", "POST", headers).status_code  # noqa: E731
    assert status(Access(TOKEN), page) == 200
    assert status(Access(TOKEN), {}) == 403
    assert status(Access(TOKEN), page | {"origin": "http://elsewhere.example"}) == 403
    assert status(Access(TOKEN, open=False), page) == 401
    assert status(Access(TOKEN, open=False), page | token) == 200
    assert _get(Access(TOKEN), "/ui/api/chat", "GET", page).status_code == 404
    answer = _get(Access(TOKEN), "/ui/api/chat?x=1", "POST", page).json()
    assert (answer["path"], answer["client"]) == ("/v1/chat/completions", "127.0.0.1")


def test_unknown_paths_answer_in_json() -> None:
    answer = _get(Access(), "/ui/api/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
