"""A path that a proxy shows before the router's own. Router process, event loop."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class WithRootPath:
    """Takes the path off requests, which a proxy may have taken off already. `root_path`: such as `/llm`."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root_path or path.startswith(f"{self._root_path}/"):
            inner = path.removeprefix(self._root_path) or "/"
            scope = {**scope, "path": inner, "raw_path": inner.encode()}
        await self._app(scope, receive, send)
