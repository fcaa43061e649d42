"""A router with one scripted node of each role and the official client, for tests of the router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types import Completion
from support.stub_node import Stack, StubNode, running_stack
from tokenizers import Tokenizer

from common.config.service_configs import RouterConfig

LONG = "the quick brown fox jumps over the lazy dog. " * 6
"""More tokens than are prefilled locally."""


class Bench:
    """The router, a node of each role, and a client of one test."""

    def __init__(self, stack: Stack, prefill: StubNode, decode: StubNode, client: AsyncOpenAI) -> None:
        self.stack, self.prefill, self.decode, self.client = stack, prefill, decode, client

    async def held(self, **fields: Any) -> asyncio.Future[Completion]:
        """The answer to a completion of `LONG`, which the decode node has begun and holds back."""
        self.decode.gate.clear()
        create: Any = self.client.completions.create
        answer = asyncio.ensure_future(create(model="stub-model", prompt=LONG, **fields))
        await self.decode.until(lambda: bool(self.decode.running))
        return answer


def play(
    model_folder: Path,
    scene: Callable[[Bench], Awaitable[None]],
    *,
    config: dict[str, Any] | None = None,
    api_key: str = "none",
    **node: Any,
) -> None:
    """Run `scene` against one prefill node, one decode node and a router; then check that all counters are at zero."""

    async def main() -> None:
        path = str(model_folder)
        prefill = StubNode("prefill", "p0", path, **node)
        decode = StubNode("decode", "d0", path, **node)
        settings = RouterConfig(**{"lease_s": 1.0, **(config or {})})
        async with (
            running_stack(settings, prefill, decode) as stack,
            AsyncOpenAI(base_url=stack.url + "/v1", api_key=api_key, max_retries=0) as client,
        ):
            await scene(Bench(stack, prefill, decode, client))
            await stack.settled()

    asyncio.run(asyncio.wait_for(main(), 60))


def script_of(text: str, tokenizer: Tokenizer, *, end: bool = True) -> Callable[[int], int]:
    """A script: the tokens of `text`, then end-of-sequence tokens, or the last token of `text`, without end."""
    ids: list[int] = tokenizer.encode(text).ids
    if end:
        end_id = tokenizer.token_to_id("</s>")
        assert end_id is not None
        ids = [*ids, end_id]
    return lambda index: ids[min(index, len(ids) - 1)]
