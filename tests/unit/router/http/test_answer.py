"""One client request's answer, from its first token until nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models

from common.base.errors import Unavailable
from common.config.service_configs import RouterConfig
from common.control.http_connection import DisconnectListener
from common.control.identities import pack_ids
from common.control.messages import EngineRequest, PeerRef, SamplingParams, TokenChunk, TokenLogprobs
from router.http.answer import Answer, whole_body
from router.http.format import FormatOptions
from router.http.openai.chat_format import ChatFormat
from router.http.openai.completion_format import CompletionFormat
from router.metrics import Metrics
from router.nodes.node_table import NodeTable
from router.requests import flow_events as f
from router.requests.dispatch import Dispatcher
from router.requests.generation import Generation
from router.requests.queued_request import Siblings
from router.requests.request import Delta, GenerationRequest, Outcome
from router.requests.story import Stories
from router.text.detokenizer import TokenPieces

PIECES = TokenPieces(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
PEER = PeerRef("d0", "inc-d0", "tcp://127.0.0.1:9", [])


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _begin(dispatcher: Dispatcher, name: str, client: DisconnectListener) -> Answer:
    answer, request = (
        Answer(),
        GenerationRequest(EngineRequest(pack_ids([0] * 100), SamplingParams(seed=0, max_tokens=2))),
    )
    answer.follow(dispatcher.submit("m", name, [request], PIECES, answer.on_news), client)
    return answer


@pytest.mark.usefixtures("no_collector")
def test_what_a_request_leaves_behind_needs_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's looks at what is old after millions of objects only: prompts would pile up for gigabytes."""

    def prepare(*_: object) -> f.Found:
        return f.Found(None, PEER, 1.0)

    def nothing(*_: object, **__: object) -> None:
        pass

    def leg(*_: object) -> tuple[float, int, float]:
        return 0.0, 0, 0.0

    async def answered(answer: Answer) -> None:
        key = answer.generations[0].flow.key
        answer.generations[0].feed(f.Chunk(PEER.incarnation, TokenChunk(key, 0, [0, 1], None, "length")))
        assert len(await answer.finished()) == 1

    async def refused(answer: Answer) -> None:
        with contextlib.suppress(Unavailable):
            await answer.finished()

    async def waiting(answer: Answer) -> None:
        assert answer.generations[0].outcome is None

    left = list[weakref.ref[Answer] | weakref.ref[Generation]]()

    async def play(dispatcher: Dispatcher, scene: Callable[[Answer], Awaitable[None]]) -> None:
        answer = _begin(dispatcher, f"r{len(left)}", DisconnectListener())
        await asyncio.sleep(0)  # it is placed
        left.extend([weakref.ref(answer), weakref.ref(answer.generations[0])])
        await scene(answer)
        answer.close()

    async def main() -> None:
        dispatcher = Dispatcher(RouterConfig(), Metrics())
        with monkeypatch.context() as patch:
            patch.setattr(Generation, "prepare", prepare)
            patch.setattr(Generation, "admit", nothing)
            patch.setattr(Generation, "_leg", leg)
            patch.setattr(NodeTable, "send", nothing)
            await play(dispatcher, answered)
        await play(dispatcher, refused)
        monkeypatch.setattr(NodeTable, "rejoining", True)
        await play(dispatcher, waiting)
        await asyncio.sleep(0.01)
        assert dispatcher.running == 0
        assert [each() for each in left] == [None] * 6
        dispatcher.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_client_that_left_before_it_was_watched_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeTable, "rejoining", True)  # the request waits for a node

    async def main() -> None:
        dispatcher = Dispatcher(RouterConfig(), Metrics())
        client = DisconnectListener()
        client.leave()
        answer = _begin(dispatcher, "r", client)
        await answer.finished()
        assert answer.abandoned
        answer.close()
        dispatcher.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("call", ["chat", "completions"])
def test_others_have_their_turns_while_many_logprobs_are_written(call: str, streamed: bool) -> None:
    """With twenty for each token, those of thousands take seconds; all streams and the nodes' leases would wait."""
    tokenizer, tokens = cast("Any", SimpleNamespace(pieces=PIECES, text_of=lambda token_id: "ab"[token_id])), 333
    options = FormatOptions("r", "m", with_logprobs=True)
    form = ChatFormat(options, tokenizer) if call == "chat" else CompletionFormat(options, tokenizer, 2)
    names = ["content"] if call == "chat" else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        answer, logprobs = Answer(), [TokenLogprobs(-0.5, [0, 1], [-0.5, -1.0])]
        for _ in range(2):
            request = GenerationRequest(EngineRequest(pack_ids([0]), SamplingParams(seed=0, max_tokens=tokens)))
            state = SimpleNamespace(stories=Stories())
            generation = Generation(
                "r",
                request,
                PIECES,
                cast("Any", state),
                max_attempts=1,
                deadline_s=1.0,
                on_news=answer.on_news,
                siblings=Siblings(),
            )
            generation._deltas = [Delta("a", [at % 2], logprobs) for at in range(tokens)]
            generation.outcome = Outcome("length")
            answer.generations.append(generation)
        answer.on_news()
        counting = asyncio.create_task(count_turns())
        if streamed:
            events = b"".join([data async for data, _ in answer.events(form)]).decode()
            bodies = [json.loads(event) for event in events.split("data: ")[1:-1]]
        else:
            bodies = [json.loads(await whole_body(form, answer.generations, await answer.finished()))]
        counting.cancel()
        assert turns > 2 * tokens // 50
        choices = [choice for body in bodies for choice in body["choices"] if choice["logprobs"] is not None]
        for name in names:
            found = [value for choice in choices if choice["index"] == 1 for value in choice["logprobs"][name]]
            assert len(found) == tokens, name
            if name == "text_offset":
                assert found == sorted(set(found))

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(("size", "on_loop"), [(1_000, True), (100_000, False)])
def test_a_long_answer_is_written_on_a_thread(size: int, on_loop: bool) -> None:
    """Parsing its text and tokenizing its reasoning would hold up the streams of others."""
    threads: list[int] = []

    def whole(*_: object) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return {}

    form = cast("Any", SimpleNamespace(options=FormatOptions("r", "m"), whole=whole))
    deltas = [[Delta("a" * (size // 10), [0], None)] * 10]
    assert asyncio.run(whole_body(form, [], deltas)) == b"{}"
    assert [each == threading.get_ident() for each in threads] == [on_loop]
