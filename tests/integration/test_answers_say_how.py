"""Every answer says how it was served: headers, the end of a stream, errors, and the request's story."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import LONG, Bench, play
from support.stub_node import StubNode, running_stack

from common.config.service_configs import RouterConfig

RELAY_LONG: dict[str, Any] = {"local_prefill_tokens": 32}
"""With these options the prompt's length decides what is relayed, not the costs learned from scripted nodes."""


async def post(bench: Bench, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=bench.stack.url, timeout=20) as http:
        return await http.post("/v1/completions", json=body, headers=headers)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_whole_answer_carries_it_all_in_headers(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.prefill.cached_tokens, bench.decode.cached_tokens = 32, 16
        answer = await post(bench, {"prompt": LONG, "max_tokens": 3})
        headers = {name[10:]: value for name, value in answer.headers.items() if name.startswith("x-kvrelay-")}
        assert headers.pop("request-id") == answer.json()["id"] == answer.headers["x-request-id"]
        weighed = json.loads(headers.pop("decision"))
        assert (weighed["prefill"]["node"], weighed["decode"]["node"]) == ("p0", "d0")
        assert "tokens" in headers.pop("reason")
        assert headers == {
            "attempt": "1",
            "policy": bench.stack.router.dispatcher.stories.recent(1)[0]["last_decision"]["policy"],
            "prefill-mode": "relayed",
            "prefill-node": "p0",
            "decode-node": "d0",
            "prefill-hit-tokens": "32",
            "decode-hit-tokens": "16",
            "relayed-bytes": "4096",
        }
        local = await post(bench, {"prompt": "hi", "max_tokens": 3})
        assert local.headers["x-kvrelay-prefill-mode"] == "local"
        assert local.headers["x-kvrelay-decode-hit-tokens"] == "16"
        assert not {"x-kvrelay-prefill-node", "x-kvrelay-prefill-hit-tokens"} & set(local.headers)

    play(model_folder, scene, config=RELAY_LONG)


def test_stream_ends_with_what_its_headers_could_not_know(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.automatic = False
        bench.decode.gate.clear()
        other = StubNode("decode", "d1", str(model_folder))
        body = {"prompt": LONG, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
        asking = asyncio.ensure_future(post(bench, body))
        await bench.decode.until(lambda: bool(bench.decode.running))
        bench.decode.step()
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 2)
        bench.decode.fail(next(iter(bench.decode.running)), "engine_error")
        answer = await asking
        assert answer.headers["x-kvrelay-attempt"] == "1"
        assert answer.headers["x-kvrelay-decode-node"] == "d0"
        assert "x-kvrelay-relayed-bytes" not in answer.headers
        *chunks, usage, done = events(answer.text)
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == 5
        assert not any("kvrelay" in chunk for chunk in chunks[:-1])
        told = chunks[-1]["kvrelay"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert (told["attempt"], told["decode_node"]) == (2, "d1")
        assert told["relayed_bytes"] == 4096
        assert told["request_id"] == answer.headers["x-kvrelay-request-id"]

    play(model_folder, scene, config=RELAY_LONG)


def test_the_clients_own_id_is_repeated_and_two_requests_may_share_it(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        body = {"prompt": LONG, "max_tokens": 3}
        bench.decode.gate.clear()
        twins = [asyncio.ensure_future(post(bench, body, **{"x-request-id": "mine"})) for _ in range(2)]
        await bench.decode.until(lambda: len(bench.decode.running) == 2)
        assert len({key.request_id for key in bench.decode.running}) == 2, "keys are made by the router"
        bench.decode.gate.set()
        answers = await asyncio.gather(*twins)
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
        assert all(len(answer.json()["choices"][0]["text"]) == 3 for answer in answers)
        assert len({answer.headers["x-kvrelay-request-id"] for answer in answers}) == 2
        named = await post(bench, {**body, "request_id": "né"})
        assert named.headers["x-request-id"] == "n?"
        story = bench.stack.router.dispatcher.stories.get("mine")
        assert story is not None
        assert story["outcome"] == "finished"
        long = await post(bench, body, **{"x-request-id": "i" * 5000})
        assert long.headers["x-request-id"] == "i" * 256

    play(model_folder, scene, config=RELAY_LONG)


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", "/v1/chat/completions", "wrong", 401),
        ("POST", "/v1/nothing", "one", 404),
        ("PUT", "/v1/completions", "one", 405),
        ("GET", "/v1/models/other", "one", 404),
        ("POST", "/api/chat", "wrong", 401),
    ],
)
def test_requests_that_no_call_has_seen_have_ids_too(
    model_folder: Path, method: str, path: str, key: str, status: int
) -> None:
    async def scene(bench: Bench) -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=bench.stack.url, headers=headers) as http:
            own = await http.request(method, path)
            assert own.status_code == status
            assert own.headers["x-request-id"] == own.headers["x-kvrelay-request-id"]
            assert own.headers["x-request-id"].startswith("req_")
            assert "request-id" not in own.headers
            given = await http.request(method, path, headers={"x-request-id": "mine"})
            assert given.headers["x-request-id"] == "mine"

    play(model_folder, scene, config={"api_key": "one"})


def test_errors_say_which_request_and_which_attempt(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        wrong = await post(bench, {"prompt": "a", "temperature": 9}, **{"x-request-id": "mine"})
        assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "mine")
        assert wrong.headers["x-kvrelay-request-id"].startswith("cmpl-")
        assert wrong.headers["x-kvrelay-attempt"] == "0"
        bench.decode.fail_with = ("engine_error", "scripted")
        failed = await post(bench, {"prompt": "a", "max_tokens": 2})
        assert (failed.status_code, failed.headers["x-kvrelay-attempt"]) == (500, "2")
        assert failed.headers["x-kvrelay-decode-node"] == "d0"
        bench.decode.fail_with = None
        bench.decode.gate.clear()
        body = {"prompt": LONG, "max_tokens": 9, "stream": True}
        async with (
            httpx.AsyncClient(base_url=bench.stack.url, timeout=20) as http,
            http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)  # the first token is out, and the headers with it
            bench.decode.fail(next(iter(bench.decode.running)), "handshake_refused")
            rest = [line async for line in lines]
        *_, error, done = events("\n".join(rest))
        assert done == "[DONE]"
        assert error["error"]["code"] == "handshake_refused"
        assert error["kvrelay"]["attempt"] == 1

    play(model_folder, scene, config={**RELAY_LONG, "max_attempts": 2})


def test_refused_for_want_of_nodes_or_room_it_still_has_an_id(model_folder: Path) -> None:
    async def main() -> None:
        config = RouterConfig(model=str(model_folder), lease_s=1.0)
        async with running_stack(config) as stack, httpx.AsyncClient(base_url=stack.url) as http:
            answer = await http.post("/v1/completions", json={"prompt": "hi"})
            assert answer.status_code == 503
            story = stack.router.dispatcher.stories.get(answer.headers["x-kvrelay-request-id"])
            assert story is not None
            assert [event["event"] for event in story["events"]] == ["arrived", "failed"]
            assert story["events"][-1]["reason"].startswith("unavailable: ")

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("streamed", [True, False])
def test_story_tells_a_request_with_a_lost_node_from_its_arrival_to_its_end(model_folder: Path, streamed: bool) -> None:
    async def scene(bench: Bench) -> None:
        other = StubNode("decode", "d1", str(model_folder))
        bench.decode.automatic = False
        bench.decode.gate.clear()
        asking = asyncio.ensure_future(post(bench, {"prompt": LONG, "max_tokens": 6, "stream": streamed}))
        await bench.decode.until(lambda: bool(bench.decode.running))
        bench.decode.step()
        stories = bench.stack.router.dispatcher.stories
        assert stories.recent(5)[0]["outcome"] == "running"
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 2)
        await bench.decode.close()
        bench.decode.running.clear()
        answer = await asking
        story = stories.get(answer.headers["x-kvrelay-request-id"])
        assert story is not None
        assert [event["event"] for event in story["events"]] == [
            *("arrived", "decision", "sent", "sent", "first_token", "handover"),
            *("node_lost", "retry", "decision", "sent", "sent", "resumed", "handover", "finished"),
        ]
        times = [event["t_s"] for event in story["events"]]
        assert times == sorted(times)
        decisions = [event["data"] for event in story["events"] if event["event"] == "decision"]
        assert [decision["decode"]["node"] for decision in decisions] == ["d0", "d1"]
        assert decisions[0]["prefill"]["node"] == "p0"
        lost = next(event for event in story["events"] if event["event"] == "node_lost")
        assert (lost["data"]["node"], lost["data"]["attempt"]) == ("d0", 1)
        assert story["usage"]["completion_tokens"] == 6
        assert json.loads(json.dumps(story)) == story, "plain data"

    play(model_folder, scene, config=RELAY_LONG)
