"""The cores of a prefill and a decode node with a fake model and a fake transport; the test delivers the messages."""

from __future__ import annotations

from typing import Any

from support.fake_engine import VOCAB, FakeRunner, FakeWire
from support.grammars import FakeGrammars
from support.mock_clock import MockClock

from common.base.clock import Clock
from common.control.identities import pack_ids
from common.control.messages import (
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Message,
    PeerRef,
    PrefillRequest,
    SamplingParams,
    TokenBatch,
)
from common.engine.executor import Executor, LocalExecutor
from common.engine.grammar.compiler import GrammarCompiler
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.node.core import CoreParts
from common.node.events import FromClient, FromPeer, OutgoingMessage, SendBuffer, ToClient, ToPeer
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode

LAYOUT = KVLayout("fake", KVSpec.uniform(1, 1, 1, "float32"))
P_REF = PeerRef("p", "p1", "tcp://p", [])
D_REF = PeerRef("d", "d1", "tcp://d", ["tcp://d-data"])
ROUTER, P_LINK = b"router", b"p-link"
KEY = AttemptKey("r", 1)
PROMPT = list(range(40))


def core_parts(
    me: PeerRef,
    layout: KVLayout,
    scheduler: Scheduler,
    executor: Executor,
    send_buffer: SendBuffer,
    clock: Clock,
    max_accepted: int = 4,
    grammars: GrammarCompiler | None = None,
) -> CoreParts:
    """What both cores are built from, with the fake model's vocabulary."""
    return CoreParts(
        me=me,
        layout=layout,
        vocab_size=VOCAB,
        scheduler=scheduler,
        executor=executor,
        grammars=FakeGrammars() if grammars is None else grammars,
        send_buffer=send_buffer,
        clock=clock,
        max_accepted=max_accepted,
        transfer_timeout_s=60.0,
    )


class Pair:
    """Both nodes; the test delivers messages by calling methods."""

    def __init__(
        self,
        *,
        p_blocks: int = 32,
        d_blocks: int = 32,
        d_layout: KVLayout = LAYOUT,
        chunk: int = 16,
        shared_cores: bool = False,
    ) -> None:
        self.clock = MockClock()
        self.p_grammars, self.d_grammars = FakeGrammars(), FakeGrammars()
        self.p_out: list[OutgoingMessage] = []
        self.d_out: list[OutgoingMessage] = []
        self.p_runner, self.d_runner = FakeRunner(p_blocks), FakeRunner(d_blocks)
        self.wire = FakeWire(self.p_runner, self.d_runner)
        self.p = PrefillNode(
            core_parts(
                P_REF,
                LAYOUT,
                Scheduler(SchedulerConfig(200, 8, chunk, chunk), BlockPool(p_blocks)),
                LocalExecutor(self.p_runner, self.wire.sender.blocks_final),
                SendBuffer(self.p_out.extend),
                self.clock,
                grammars=self.p_grammars,
            ),
            self.wire.sender,
        )
        self.p_grammars.post = self.p.handle
        self.d = DecodeNode(
            core_parts(
                D_REF,
                d_layout,
                Scheduler(SchedulerConfig(200, 8, chunk, chunk), BlockPool(d_blocks)),
                LocalExecutor(self.d_runner),
                SendBuffer(self.d_out.extend),
                self.clock,
                grammars=self.d_grammars,
            ),
            self.wire.receiver,
            early_s=3.0,
            shared_cores=shared_cores,
        )
        self.d_grammars.post = self.d.handle
        self.wire.on_sender_event = self.p.handle
        self.wire.on_receiver_event = self.d.handle

    def request(
        self,
        key: AttemptKey = KEY,
        prompt: list[int] = PROMPT,
        max_tokens: int = 5,
        *,
        router: bytes = ROUTER,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, **sampling)
        asked = EngineRequest(pack_ids(prompt), params)
        self.d.handle(FromClient(router, DecodeRequest(key, asked, pack_ids(), P_REF, 600.0)))
        self.p.handle(FromClient(router, PrefillRequest(key, asked, pack_ids(), D_REF, 600.0)))

    def step_prefill(self) -> None:
        self.p.step()
        self.p.send_buffer.flush()

    def step_decode(self) -> None:
        self.d.step()
        self.d.send_buffer.flush()

    def to_decode(self, kind: type | None = None) -> list[Message]:
        """Deliver the prefill node's messages (of one kind, if given) to the decode node."""
        sent = [out.message for out in self.p_out if isinstance(out, ToPeer)]
        sent = [message for message in sent if kind is None or isinstance(message, kind)]
        self.p_out[:] = [out for out in self.p_out if isinstance(out, ToClient) or out.message not in sent]
        for message in sent:
            self.d.handle(FromClient(P_LINK, message))
        return sent

    def to_prefill(self) -> list[Message]:
        """Deliver the decode node's messages to the prefill node."""
        self.d.send_buffer.flush()
        sent = [out.message for out in self.d_out if isinstance(out, ToClient) and out.identity == P_LINK]
        self.d_out[:] = [out for out in self.d_out if out.message not in sent]
        for message in sent:
            self.p.handle(FromPeer(D_REF.incarnation, message))
        return sent

    def run(self, rounds: int = 100) -> None:
        """Run both nodes until they are idle."""
        for _ in range(rounds):
            self.step_prefill()
            self.to_decode()
            self.step_decode()
            self.to_prefill()
            while self.wire.pump():
                pass

    def heard(self, out: list[OutgoingMessage], router: bytes = ROUTER) -> list[Message]:
        """The messages that the router received."""
        return [o.message for o in out if isinstance(o, ToClient) and o.identity == router]

    def tokens(self, key: AttemptKey = KEY, router: bytes = ROUTER) -> list[int]:
        chunks = [
            chunk
            for message in self.heard(self.p_out, router) + self.heard(self.d_out, router)
            if isinstance(message, TokenBatch)
            for chunk in message.chunks
            if chunk.key == key
        ]
        return [token for chunk in sorted(chunks, key=lambda chunk: chunk.start) for token in chunk.token_ids]

    def assert_whole(self) -> None:
        for node in (self.p, self.d):
            assert not node.attempts
            assert node.scheduler.pool.num_used == 0
            node.scheduler.check_integrity()
