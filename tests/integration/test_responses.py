"""`/v1/responses` through the official client, with scripted nodes and a real Redis."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from redis import Redis
from support.redis_server import RedisServer
from support.router_bench import script_of
from support.stub_node import MAX_LEN, StubNode, running_stack
from support.tool_model import CALLS, VOCAB_SIZE, make_tool_model
from tokenizers import Tokenizer

from common.base.errors import NotFound
from common.cluster.redis_keys import Keys
from common.config.service_configs import RouterConfig
from router.http.background_responses import BackgroundResponses
from router.http.response_store import MAX_ENTRY_BYTES, ResponseStore, StoredResponse
from router.text.tokenizer import Tokenizer as ServedTokenizer

TOOLS: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("weather", "time")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("responses") / "stub-model")


class Bench:
    """A router, its nodes and clients of two tenants."""

    def __init__(self, url: str, node: StubNode, tokenizer: Tokenizer) -> None:
        self.url, self.node, self._tokenizer = url, node, tokenizer
        self.client, self.other = (
            AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) for key in ("one", "two")
        )

    def prompt(self) -> str:
        """The prompt of the newest request."""
        return self._tokenizer.decode(self.node.requests()[-1].token_ids, skip_special_tokens=False)


def _play(folder: Path, answer: str, scene: Callable[[Bench], Awaitable[None]], store: ResponseStore | None) -> None:
    async def main() -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        script = script_of(answer, tokenizer)
        nodes = [StubNode(role, role, str(folder), script, vocab_size=VOCAB_SIZE) for role in ("prefill", "decode")]
        config = RouterConfig(lease_s=1.0, api_key="one,two")
        async with running_stack(config, *nodes, responses=store) as stack:
            bench = Bench(stack.url, nodes[1], tokenizer)
            async with bench.client, bench.other:
                await scene(bench)
            await stack.settled()
        if store is not None:
            await store.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_text_and_calls_are_the_same_items_whole_and_streamed(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        whole = await bench.client.responses.create(model="stub-model", input="Paris?", tools=TOOLS, store=False)
        message, weather, time = whole.output
        assert whole.output_text.startswith("Let me look.")
        assert (message.type, weather.type, time.type) == ("message", "function_call", "function_call")
        assert json.loads(weather.arguments) == {"city": "Zürich"}
        assert (whole.status, whole.tools[0].type) == ("completed", "function")

        async with bench.client.responses.stream(
            model="stub-model", input="Paris?", tools=TOOLS, store=False
        ) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 3
        plain = [
            {key: value for key, value in item.to_dict().items() if key not in ("id", "call_id")}
            for item in whole.output
        ]
        streamed = [item.to_dict() for item in final.output]
        for item in streamed:
            for extra in ("id", "call_id", "parsed_arguments"):
                item.pop(extra, None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
        assert streamed == plain
        assert final.usage == whole.usage

    _play(folder, CALLS, scene, None)


def test_reasoning_comes_first_and_the_limit_is_named(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        whole = await bench.client.responses.create(model="stub-model", input="hi", store=False)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        async with bench.client.responses.stream(model="stub-model", input="hi", store=False) as stream:
            kinds = {event.type async for event in stream}
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
        short = await bench.client.responses.create(model="stub-model", input="hi", max_output_tokens=2, store=False)
        assert short.status == "incomplete"
        assert short.incomplete_details is not None
        assert short.incomplete_details.reason == "max_output_tokens"
        many = await bench.client.responses.create(model="stub-model", input="hi", max_output_tokens=10**5, store=False)
        assert (many.status, many.max_output_tokens) == ("completed", 10**5)
        cut = await bench.client.responses.create(
            model="stub-model", input="fox " * 900, max_output_tokens=10**5, extra_body={"truncate_prompt_tokens": -1}
        )
        assert cut.usage is not None
        assert cut.usage.input_tokens > 400, "an answer cannot have so many tokens: the prompt is not cut for it"
        asked = bench.node.requests()[-1]
        assert len(asked.token_ids) + asked.request.sampling.max_tokens == MAX_LEN

    _play(folder, "<think>hm so</think>yes", scene, None)


def test_items_reach_the_template_as_the_conversation_they_mean(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "Paris?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]
        await bench.client.responses.create(model="stub-model", input=items, instructions="Be brief", store=False)
        assert bench.prompt() == (
            "<|system|>Be brief</s><|user|>Paris?</s>"
            '<|assistant|>I look.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call></s>'
            "<|tool|>rain</s><|assistant|>"
        )

    _play(folder, "sun", scene, None)


def test_what_is_not_supported_is_refused_by_name(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        unknown_type = {"type": "json_schema", "name": "x", "schema": {"type": "typo"}}
        async with httpx.AsyncClient(base_url=bench.url, headers={"authorization": "Bearer one"}) as http:
            for field, said in (
                ({"input": image}, "input_image"),
                ({"tools": [{"type": "web_search"}]}, "tools"),
                ({"background": True, "store": False}, "background"),
                ({"background": True, "stream": True}, "background"),
                ({"top_logprobs": 21}, "top_logprobs"),
                ({"conversation": "c"}, "conversation"),
                ({"prompt": {"id": "p"}}, "prompt"),
                ({"truncation": "auto"}, "truncation"),
                ({"text": {"format": unknown_type}}, "text.format: the grammar"),
                ({"input": "hi " * 2 * MAX_LEN}, "maximum context length"),
                ({"min_tokens": 9, "max_output_tokens": 2}, "min_tokens is 9"),
            ):
                refused = await http.post("/v1/responses", json={"input": "hi", **field})
                assert refused.status_code == 400
                assert said in refused.json()["error"]["message"]
                assert refused.json()["error"]["param"] == next(iter(field))

            assert (await http.get("/v1/responses/resp_0")).status_code == 404
            assert (await http.put("/v1/responses/resp_0")).headers["allow"] == "DELETE, GET, HEAD"

    _play(folder, "sun", scene, None)


async def _ended(client: AsyncOpenAI, response_id: str) -> Any:
    while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    return found


def test_background_answers_are_fetched_later(folder: Path, redis_server: RedisServer, cluster: str) -> None:
    async def scene(bench: Bench) -> None:
        create = bench.client.responses.create
        bench.node.gate.clear()
        begun = await create(model="stub-model", input="one?", background=True)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await create(model="stub-model", input="two?", previous_response_id=begun.id)
        with pytest.raises(openai.NotFoundError):
            await bench.other.responses.cancel(begun.id)
        bench.node.gate.set()
        done = await _ended(bench.client, begun.id)
        assert (done.status, done.output_text) == ("completed", "sun")
        assert (await bench.client.responses.cancel(begun.id)).status == "completed"
        await create(model="stub-model", input="two?", previous_response_id=begun.id, store=False)
        assert "<|assistant|>sun</s><|user|>two?" in bench.prompt()
        plain = await create(model="stub-model", input="x")
        with pytest.raises(openai.BadRequestError, match="background=true"):
            await bench.client.responses.cancel(plain.id)
        failed = await create(
            model="stub-model",
            input="x",
            background=True,
            extra_body={"structured_outputs": {"grammar": "start: nothing"}},
        )
        assert (await _ended(bench.client, failed.id)).error is not None

    _play(folder, "sun", scene, ResponseStore(redis_server.url, cluster, 10))


@pytest.mark.parametrize("here", [True, False])
def test_background_answers_are_cancelled_by_any_router(
    folder: Path, redis_server: RedisServer, cluster: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.background_responses._LOOK_S", 0.05)
    store = ResponseStore(redis_server.url, cluster, 10)

    async def scene(bench: Bench) -> None:
        bench.node.gate.clear()
        begun = await bench.client.responses.create(model="stub-model", input="one?", background=True)
        await bench.node.until(lambda: bool(bench.node.running))
        if here:
            cancelled = await bench.client.responses.cancel(begun.id)
        else:
            (name,) = [key.decode() async for key in store._client.scan_iter(f"*{begun.id}")]
            tenant = name.removesuffix(f":{begun.id}").rpartition(":")[2]
            await BackgroundResponses().cancel(tenant, store, begun.id)
            cancelled = await _ended(bench.client, begun.id)
        assert cancelled.status == "cancelled"
        await bench.node.until(lambda: not bench.node.running)
        bench.node.gate.set()

    _play(folder, "sun", scene, store)


def test_a_response_is_continued_by_its_owner_only(folder: Path, redis_server: RedisServer, cluster: str) -> None:
    async def scene(bench: Bench) -> None:
        create = bench.client.responses.create
        first = await create(model="stub-model", input="one?", instructions="Be brief")
        assert re.fullmatch(r"resp_[0-9a-f]{24}", first.id), "LangChain and pydantic-ai continue no others"
        async with bench.client.responses.stream(
            input="two?", model="stub-model", previous_response_id=first.id
        ) as two:
            second = await two.get_final_response()
        third = await create(model="stub-model", input="three?", previous_response_id=second.id, store=False)
        assert bench.prompt() == (
            "<|user|>one?</s><|assistant|>sun</s><|user|>two?</s><|assistant|>sun</s><|user|>three?</s><|assistant|>"
        )
        assert (await bench.client.responses.retrieve(second.id)).output_text == "sun"
        with pytest.raises(openai.BadRequestError, match="not streamed"):
            await bench.client.responses.retrieve(second.id, stream=True)
        for response_id, client in ((first.id, bench.other), (third.id, bench.client), ("resp_../x", bench.client)):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response_id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(input="x", model="stub-model", previous_response_id=response_id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(response_id)
        await bench.client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await bench.client.responses.retrieve(first.id)

    _play(folder, "sun", scene, ResponseStore(redis_server.url, cluster, 10))


def test_the_input_of_a_stored_response_is_listed_in_pages(
    folder: Path, redis_server: RedisServer, cluster: str
) -> None:
    async def scene(bench: Bench) -> None:
        create, items = bench.client.responses.create, bench.client.responses.input_items
        first = await create(model="stub-model", input="Paris?", tools=TOOLS)
        call: Any = first.output[1]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await create(model="stub-model", input=[output], previous_response_id=first.id, tools=TOOLS)
        listed: list[Any] = [item async for item in items.list(second.id, order="asc", limit=2)]
        kinds = ["message", "message", "function_call", "function_call", "function_call_output"]
        assert [item.type for item in listed] == kinds
        assert listed[0].content[0].to_dict() == {"type": "input_text", "text": "Paris?"}
        assert (listed[1].role, listed[1].content[0].text) == ("assistant", first.output_text)
        assert (listed[2].call_id, listed[2].name, listed[2].arguments) == (call.call_id, call.name, call.arguments)
        assert listed[4].output == "rain"
        newest_first = await items.list(second.id)
        assert [item.id for item in newest_first.data] == [item.id for item in reversed(listed)]
        assert newest_first.has_more is False
        (asked,) = (await items.list(first.id)).data
        assert asked.type == "message"

        for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "msg_x"}, "after")):
            with pytest.raises(openai.BadRequestError) as refused:
                await items.list(second.id, extra_query=query)
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await bench.other.responses.input_items.list(second.id)

    _play(folder, CALLS, scene, ResponseStore(redis_server.url, cluster, 10))


def test_the_tokens_of_an_input_are_counted_as_they_are_served(
    folder: Path, redis_server: RedisServer, cluster: str
) -> None:
    async def scene(bench: Bench) -> None:
        count, create = bench.client.responses.input_tokens.count, bench.client.responses.create
        first = await create(model="stub-model", input="Paris?", tools=TOOLS)
        assert first.usage is not None
        assert (await count(model="stub-model", input="Paris?", tools=TOOLS)).input_tokens == first.usage.input_tokens
        second = await create(model="stub-model", input="And?", previous_response_id=first.id)
        counted = await count(model="stub-model", input="And?", previous_response_id=first.id)
        assert second.usage is not None
        assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": second.usage.input_tokens}
        async with httpx.AsyncClient(base_url=bench.url, headers={"authorization": "Bearer one"}) as http:
            assert (await http.post("/v1/responses/compact", json={})).status_code == 404

    _play(folder, "sun", scene, ResponseStore(redis_server.url, cluster, 10))


def test_references_mean_items_of_stored_responses_of_the_same_key(
    folder: Path, redis_server: RedisServer, cluster: str
) -> None:
    async def scene(bench: Bench) -> None:
        create = bench.client.responses.create
        asked: Any = {"role": "user", "content": "Paris?"}
        first = await create(model="stub-model", input=[asked], tools=TOOLS)
        refs: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
        assert len(refs) == 3
        rest: Any = [
            {"type": "function_call_output", "call_id": getattr(item, "call_id", ""), "output": "rain"}
            for item in first.output[1:]
        ]
        second = await create(model="stub-model", input=[asked, *refs, *rest], tools=TOOLS)
        by_reference = bench.prompt()
        plain: Any = [item.to_dict() for item in first.output]
        await create(model="stub-model", input=[asked, *plain, *rest], tools=TOOLS, store=False)
        assert bench.prompt() == by_reference
        await create(model="stub-model", input="And?", previous_response_id=second.id, tools=TOOLS, store=False)
        assert bench.prompt().startswith(by_reference)

        hidden = await create(model="stub-model", input="x", store=False)
        absent = [hidden.output[0].id, refs[0]["id"] + "9", refs[0]["id"].replace("msg", "fc"), "x"]
        for item_id, client in ((refs[0]["id"], bench.other), *((each, bench.client) for each in absent)):
            with pytest.raises(openai.NotFoundError, match="no stored item"):
                await client.responses.create(model="stub-model", input=[{"type": "item_reference", "id": item_id}])

    _play(folder, CALLS, scene, ResponseStore(redis_server.url, cluster, 10))


@pytest.mark.parametrize(("size_bytes", "on_loop"), [(100, True), (100_000, False)])
def test_a_long_stored_conversation_is_rendered_on_a_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, on_loop: bool
) -> None:
    rendered_on_loop: list[bool] = []
    render_chat = ServedTokenizer.render_chat

    def noting(self: ServedTokenizer, *args: Any, **kwargs: Any) -> str:
        rendered_on_loop.append(threading.current_thread() is threading.main_thread())
        return render_chat(self, *args, **kwargs)

    class Store(ResponseStore):
        async def get(self, tenant: str, response_id: str) -> StoredResponse:
            return StoredResponse({}, [{"role": "user", "content": "one?"}], size_bytes)

    async def scene(bench: Bench) -> None:
        monkeypatch.setattr(ServedTokenizer, "render_chat", noting)
        create = bench.client.responses.create
        await create(model="stub-model", input="two?", previous_response_id="resp_1", store=False)
        assert rendered_on_loop == [on_loop]

    _play(folder, "sun", scene, Store("redis://127.0.0.1:1/0", "c", 10))


def test_without_redis_answers_are_given_and_only_continuing_fails(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        whole = await bench.client.responses.create(model="stub-model", input="hi")
        assert whole.output_text == "sun"
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as refused:
            await bench.client.responses.create(model="stub-model", input="hi", previous_response_id=whole.id)
        assert refused.value.status_code == 503

    _play(folder, "sun", scene, ResponseStore("redis://127.0.0.1:1/0", "c", 10))


def test_the_store_is_bounded_in_number_and_size(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        store = ResponseStore(redis_server.url, cluster, 2)
        ids = [f"resp_{index:024x}" for index in range(4)]
        for response_id in ids[:3]:
            await store.put("t", StoredResponse({"id": response_id}, []))
        await store.put("t", StoredResponse({"id": ids[3], "text": "x" * MAX_ENTRY_BYTES}, []))
        found = await asyncio.gather(*(store.get("t", each) for each in ids), return_exceptions=True)
        sizes = [each.size_bytes if isinstance(each, StoredResponse) else 0 for each in found]
        assert [size > 0 for size in sizes] == [False, True, True, False]
        await store.close()

    asyncio.run(main())


def test_responses_of_one_tenant_never_remove_those_of_another(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        store, kept = ResponseStore(redis_server.url, cluster, 3), f"resp_{0:024x}"
        await store.put("calm", StoredResponse({"id": kept}, []))
        for index in range(1, 20):
            await store.put("greedy", StoredResponse({"id": f"resp_{index:024x}"}, []))
        assert (await store.get("calm", kept)).response == {"id": kept}
        with pytest.raises(NotFound, match="no stored response"):
            await store.get("greedy", f"resp_{16:024x}")
        assert (await store.get("greedy", f"resp_{17:024x}")).response
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("what", ["text", "later"])
def test_the_store_heals_a_key_of_another_type_and_entries_of_a_clock_that_was_ahead(
    redis_server: RedisServer, cluster: str, what: str
) -> None:
    """Where the list's key had another type, responses were stored without a bound on their number. Where the list was full of
    entries from a router whose clock was ahead, each new response was removed at once, as the oldest."""
    ids = [f"resp_{index:024x}" for index in range(4)]
    key = Keys(cluster).responses("t")
    redis = Redis.from_url(redis_server.url)
    if what == "text":
        redis.set(key, "text")
    else:
        redis.zadd(key, {f"resp_{index:024x}": time.time() + 1e7 for index in range(10, 12)})

    async def main() -> None:
        store = ResponseStore(redis_server.url, cluster, 2)
        for response_id in ids:
            await store.put("t", StoredResponse({"id": response_id}, []))
        found = await asyncio.gather(*(store.get("t", each) for each in ids), return_exceptions=True)
        assert [isinstance(each, StoredResponse) for each in found] == [False, False, True, True]
        await store.close()

    asyncio.run(main())
    assert redis.zrange(key, 0, -1) == [each.encode() for each in ids[2:]]
    redis.close()
