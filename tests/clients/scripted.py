"""A router on stub nodes whose answers a script decides by the prompt: what agents need, who call tools and send what they did.

Runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.redis_server import RedisServer
from support.router_bench import script_of
from support.stub_node import Sequence, StubNode, TokenChunk, running_stack
from support.tool_model import VOCAB_SIZE, make_tool_model
from tokenizers import Tokenizer

from common.config.service_configs import RouterConfig
from router.http.response_store import ResponseStore

CONTEXT = 262_144
"""Tokens; each is a character of an agent's prompt."""
MODEL = "scripted"


@dataclass
class ScriptedNode(StubNode):
    """A node that answers with the text that `answer(prompt)` returns."""

    tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer.from_str("{}"))
    answer: Callable[[str], str] = str
    _scripts: dict[str, Callable[[int], int]] = field(default_factory=dict)

    def _next_chunk(self, sequence: Sequence) -> TokenChunk:
        request_id = sequence.key.request_id
        if request_id not in self._scripts:
            prompt = self.tokenizer.decode(sequence.request.token_ids, skip_special_tokens=False)
            self._scripts[request_id] = script_of(self.answer(prompt), self.tokenizer)
        self.script = self._scripts[request_id]
        return super()._next_chunk(sequence)


@contextlib.contextmanager
def scripted_router(folder: Path, template: Path, answer: Callable[[str], str]) -> Iterator[str]:
    """The URL of a router whose model has this chat template."""
    model = make_tool_model(folder / MODEL)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ready, ended = threading.Event(), threading.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        nodes = [
            ScriptedNode(
                role,
                f"{role}-0",
                str(model),
                vocab_size=VOCAB_SIZE,
                remembers=False,
                max_len=CONTEXT,
                model_name=MODEL,
                tokenizer=tokenizer,
                answer=answer,
            )
            for role in ("prefill", "decode")
        ]
        store = ResponseStore(redis.url, "scripted", max_entries=100)
        config = RouterConfig(chat_template=str(template), max_body_mb=16)
        async with running_stack(config, *nodes, responses=store) as stack:
            url = stack.url
            ready.set()
            await asyncio.to_thread(ended.wait)

    with RedisServer() as redis:
        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scripted-router")
        thread.start()
        try:
            assert ready.wait(60), "the router has not started"
            yield url
        finally:
            ended.set()
            thread.join()
