"""A decode node in this process: its core, scheduler and model on an engine thread, without sockets, Redis or forks.

Prompts are computed by the node itself, as it does for requests without a prefill node. Importing this module imports
torch.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from common.base.clock import monotonic
from common.base.errors import TransferAborted
from common.config.service_configs import DecodeConfig
from common.control.messages import AttemptKey, Message, ModelInfo, PeerRef
from common.engine.kv_transfer import TransferOrder
from common.engine.loop import EngineLoop
from common.node.core import CoreParts
from common.node.events import FromClient, OutgoingMessage, SendBuffer
from common.node.parts import make_grammars, make_pool, make_scheduler
from common.node.plan import NodePlan, fit_memory
from common.node.ranks.leader import Leader
from common.node.transfers import NodeTransfers
from decode_node.node import DecodeNode
from decode_node.role import ROLE
from kvrelay.offline.run_async import start_thread

MAX_ACCEPTED = 1024
"""Requests that the node holds at once, waiting ones included."""
_CLIENT = b"offline"


class LocalNode:
    """A decode node of one rank. Its messages go to `deliver`, on the engine's thread, which also owns `core`."""

    def __init__(
        self,
        config: DecodeConfig,
        deliver: Callable[[list[OutgoingMessage]], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Load the model. Blocking, seconds to minutes.

        Raises: ConfigError in one sentence for what cannot start.
        """
        self._deliver, self._on_crash = deliver, on_crash
        # The engine's thread inherits the floating-point environment that the start sets, but the caller's stays as it is;
        # and the caller may have an asyncio loop of its own.
        started = start_thread(lambda: self._start(config), "start")
        try:
            started.result()
        except BaseException:  # Ctrl-C: the start goes on, and nobody would end what it starts
            started.add_done_callback(lambda _: self.close() if started.exception() is None else None)
            raise

    def _start(self, config: DecodeConfig) -> None:
        plan = ROLE.plan(config)
        # No stream waits for its next token, so prompts may fill whole steps.
        plan = replace(plan, steps=replace(plan.steps, prefill_chunk=plan.steps.max_num_batched_tokens))
        self._leader = leader = Leader(ROLE, plan)
        asyncio.run(leader.load())
        try:
            self._start_core(plan)
        except BaseException:
            leader.close()
            raise

    def _start_core(self, plan: NodePlan) -> None:
        plan = fit_memory(plan, self._leader.num_blocks)
        self.model: ModelInfo = plan.model
        send_buffer = SendBuffer(self._deliver)
        self._grammars = make_grammars(plan, self._post)
        self.core = core = DecodeNode(
            self._parts(plan, send_buffer),
            NodeTransfers(1, _ignore, self._post, lambda _: _NoRelay()),
            early_s=plan.config.lease_s,
        )
        self._loop = EngineLoop(core, send_buffer.flush, self._on_crash)
        self._loop.start()

    def _parts(self, plan: NodePlan, send_buffer: SendBuffer) -> CoreParts:
        leader = self._leader
        return CoreParts(
            me=PeerRef("offline", secrets.token_hex(8), "", []),
            layout=plan.layout,
            vocab_size=plan.model.vocab_size,
            scheduler=make_scheduler(plan, make_pool(plan, leader.num_blocks), leader.worker.draft, leader.run_head),
            executor=leader.executor(post=self._post),
            grammars=self._grammars,
            send_buffer=send_buffer,
            clock=monotonic,
            max_accepted=MAX_ACCEPTED,
            transfer_timeout_s=plan.config.transfer_timeout_s,
        )

    def send(self, message: Message) -> None:
        """Hand a message to the node, as if a router had sent it. Any thread."""
        self._post(FromClient(_CLIENT, message))

    def close(self) -> None:
        """End after the step that is running. Raises: TimeoutError if that takes too long."""
        self._loop.stop()
        self._grammars.close()
        self._leader.close()

    def _post(self, event: object) -> None:
        self._loop.post(event)


class _NoRelay:
    """The transfer end of a node that no other node can reach."""

    address = ""

    def apply(self, order: TransferOrder) -> None:
        raise TransferAborted("an engine without sockets moves no KV")

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass


def _ignore(order: TransferOrder) -> None:
    """There are no other ranks."""
