"""What the check scripts share. They run in a client's own environment, so this needs nothing but Python.

A script is called with the server's base URL (`http://HOST:PORT`), the model's name and, for some, a folder. It prints one
JSON line for each check: its name, and why it failed (empty if it passed).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1], sys.argv[2]
V1 = f"{URL}/v1"
QUESTION = "What is the capital of France?"
_CHECKS: list[tuple[str, Callable[[], Any]]] = []

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Berlin"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a check; it passes unless it raises."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _CHECKS.append((name, function))
        return function

    return register


def post(path: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a POST. Raises: HTTPError for other statuses than 200."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def run() -> None:
    """Run the registered checks in their order."""
    for name, function in _CHECKS:
        why = ""
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_finish(result))
        except BaseException as error:
            at = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in at if frame.filename == sys.argv[0]]
            why = f"{type(error).__name__}: {str(error).strip()[:300] or 'assertion'} (line {own[-1] if own else '?'})"
        print(json.dumps({"check": name, "why": why}), flush=True)


async def _finish(awaitable: Any) -> None:
    await awaitable
