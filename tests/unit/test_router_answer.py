"""One client request's answer, from its first token until nothing of it is left."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from starlette.types import Message
from tokenizers import Tokenizer, models

from common.protocol import AttemptKey, PeerRef, SamplingParams, TokenChunk
from router import flow_events as f
from router.answer import Answer
from router.detokenizer import TokenPieces
from router.dispatch import Dispatcher, DispatchSettings
from router.generation import Generation, GenerationRequest
from router.metrics import Metrics
from router.nodes import NodeTable

PIECES = TokenPieces(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
PEER = PeerRef("d0", "inc-d0", "tcp://127.0.0.1:9", [])


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def _never() -> Message:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


@pytest.mark.usefixtures("no_collector")
def test_what_a_request_leaves_behind_needs_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's looks at what is old after millions of objects only: prompts would pile up for gigabytes."""

    def place(_: Dispatcher, generation: Generation, wanted: f.Place) -> None:
        generation.feed(f.Placed(None, PEER, 1.0))

    monkeypatch.setattr(Dispatcher, "place", place)
    monkeypatch.setattr(NodeTable, "send", lambda *_, **__: None)

    async def serve(dispatcher: Dispatcher, name: str) -> weakref.ref[Generation]:
        answer, request = Answer(), GenerationRequest([0] * 100, SamplingParams(seed=0, max_tokens=2))
        answer.generations = dispatcher.submit(name, [request], PIECES, answer.on_news)
        answer.watch(_never)
        generation = answer.generations[0]
        generation.feed(f.Chunk(PEER.incarnation, TokenChunk(AttemptKey(name, 1), 0, [0, 1], None, "length")))
        assert len(await answer.finished()) == 1
        answer.close()
        return weakref.ref(generation)

    async def main() -> None:
        dispatcher = Dispatcher(DispatchSettings(), Metrics())
        left = [await serve(dispatcher, f"r{number}") for number in range(3)]
        await asyncio.sleep(0.01)  # the watchers end
        assert dispatcher.running == 0
        assert [each() for each in left] == [None] * 3
        dispatcher.close()

    asyncio.run(asyncio.wait_for(main(), 20))
