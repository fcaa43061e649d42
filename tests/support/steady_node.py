"""Stub nodes with the same times for every request, whatever else runs: a server against which clients can be compared."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from support.stub_node import Sequence, StubNode

from common.base.errors import Unavailable
from common.control.links import Identity
from common.control.messages import DecodeRequest, Message, PrefillRequest, TokenBatch


@dataclass
class SteadyNode(StubNode):
    """A node whose first token comes after `first_s`, and each later one `token_s` after the one before."""

    first_s: float = 0.2
    token_s: float = 0.02

    def __post_init__(self) -> None:
        self._playing: set[asyncio.Task[None]] = set()
        super().__post_init__()

    async def close(self) -> None:
        for task in list(self._playing):
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        await super().close()

    def _on_message(self, identity: Identity, message: Message) -> None:
        super()._on_message(identity, message)
        if isinstance(message, PrefillRequest | DecodeRequest) and message.key in self.running:
            task = asyncio.get_running_loop().create_task(self._play(self.running[message.key]))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)

    async def _play(self, sequence: Sequence) -> None:
        """Send the tokens of one request at their times, counted from its arrival: delays do not add up."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.first_s
        if isinstance(sequence.request, DecodeRequest) and sequence.request.prefill is not None:
            due_s += self.token_s  # the prefill node sends the first one
        while sequence.key in self.running:
            await asyncio.sleep(due_s - loop.time())
            if sequence.key in self.running:
                with contextlib.suppress(Unavailable):
                    self._server.send(sequence.identity, TokenBatch([self._next_chunk(sequence)]))
            due_s += self.token_s

    async def _run(self) -> None:
        await asyncio.Event().wait()
