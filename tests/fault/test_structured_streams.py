"""kill -9 of a node while it generates under grammars: the same bytes as without, and valid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from support.system import System, running_system

STREAMS = 4
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 12},
        "kind": {"enum": ["a first kind", "a second kind"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 12, "maxItems": 12}


def body(number: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"List number {number}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA, "strict": True}},
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 1500,
        "stream": True,
    }


class Stream:
    """One client's view."""

    def __init__(self) -> None:
        self.text = ""
        self.chunks = 0
        self.finish_reason: str | None = None
        self.begun = asyncio.Event()

    async def read(self, client: httpx.AsyncClient, number: int, until_begun: int) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body(number)) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.text += choice["delta"].get("content") or ""
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                self.chunks += 1
                if self.chunks >= until_begun:
                    self.begun.set()


async def read_all(system: System, kill: str | None = None, after: int = 12) -> list[Stream]:
    """All streams to their end; when each has sent `after` chunks, kill -9 the node of that role."""
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(base_url=system.url, timeout=90.0) as client, asyncio.TaskGroup() as tasks:
        for number, stream in enumerate(streams):
            tasks.create_task(stream.read(client, number, after))
        if kill is not None:
            for stream in streams:
                await stream.begun.wait()
            assert any(stream.finish_reason is None for stream in streams), "some streams must still run"
            system.kill(kill)
    return streams


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("structured")
    args = ("--model", "demo", "--dtype", "float32", "--kv-blocks", "800", "--local-prefill-tokens", "0")
    with running_system(folder, *args) as running:
        running.wait_usable()
        yield running


@pytest.mark.parametrize(
    ("role", "after"),
    [("decode", 12), pytest.param("prefill", 1, marks=pytest.mark.thorough)],
)
def test_the_bytes_are_those_of_an_undisturbed_run_and_valid(system: System, role: str, after: int) -> None:
    quiet = asyncio.run(read_all(system))
    for stream in quiet:
        assert stream.finish_reason == "stop", stream.text
        jsonschema.validate(json.loads(stream.text), SCHEMA)
    killed = asyncio.run(read_all(system, role, after))
    assert [stream.text for stream in killed] == [stream.text for stream in quiet]
    assert [stream.finish_reason for stream in killed] == ["stop"] * STREAMS
    system.wait_usable()
    system.wait_whole()


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["one\nline", 'a "quoted" word']}, {"one\nline", 'a "quoted" word'}),
        ({"guided_regex": "[ab]{3}"}, {x + y + z for x in "ab" for y in "ab" for z in "ab"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" [12]'}}, {"x1", "x2"}),
    ],
)
def test_an_answer_follows_what_was_asked_for(system: System, fields: dict[str, Any], texts: set[str]) -> None:
    asked = {"model": "demo", "prompt": "Say it:", "max_tokens": 50, "ignore_eos": True, **fields}
    answer = httpx.post(f"{system.url}/v1/completions", json=asked, timeout=60.0).json()
    assert answer["choices"][0]["text"] in texts
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_place(system: System) -> None:
    asked = {"model": "demo", "prompt": "x", "guided_regex": "a{3"}
    answer = httpx.post(f"{system.url}/v1/completions", json=asked, timeout=60.0)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "guided_regex"
    assert "a{3" in error["message"]
