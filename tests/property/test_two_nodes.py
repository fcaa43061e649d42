"""A prefill node and a decode node in one process: the real cores of both, messages and slices in any order.

Step outputs arrive at once, or as events at any later time while the next step is prepared.
Random interleavings of arrivals, steps, deliveries, transfers, aborts, failed steps and a lost peer. Every undisturbed
request must get the tokens of an undisturbed run, every other one exactly one failure, or none if it was aborted, and in
the end both pools must be whole.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_engine import VOCAB, FakeRunner, FakeWire, generate
from support.mock_clock import MockClock
from support.node_pair import core_parts

from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Message,
    PeerRef,
    PrefillRequest,
    SamplingParams,
    TokenBatch,
)
from common.engine.executor import LocalExecutor, OnBlocksFinal, StepDone, StepFailed
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.step import StepInput
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.node.events import FromClient, FromPeer, OutgoingMessage, PeerGone, SendBuffer, ToClient
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode

PLANES = (KVPlane("k", 1),)
SPECS = [
    KVSpec.uniform(1, 1, 1, "float32"),
    KVSpec((LayerGroup((0,), PLANES, 1, "float32", window=20),)),
    KVSpec((LayerGroup((0,), PLANES, 1, "float32"), LayerGroup((1,), PLANES, 1, "float32", window=33, table=1))),
]
"""Without and with a sliding window, and layers of both kinds."""
P_REF = PeerRef("p", "p-incarnation", "tcp://p", [])
D_REF = PeerRef("d", "d-incarnation", "tcp://d", ["tcp://d-data"])
ROUTER, P_LINK = b"router", b"p-link"
PREFIX = list(range(64))


class Client:
    """A router's view of one attempt."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.expected = generate(prompt, max_tokens)
        self.tokens: dict[int, int] = {}
        self.finished = False
        self.failures = 0
        self.disturbed = False


class LateExecutor:
    """Computes at once, but the result of a step is a separate event. Every other failure is reported only with it."""

    def __init__(self, executor: LocalExecutor, events: deque[object]) -> None:
        self.executor = executor
        self.events = events
        self.failures = 0

    def submit(self, step: StepInput) -> None:
        try:
            self.events.append(StepDone(self.executor.submit(step)))
        except RuntimeError as error:
            self.failures += 1
            if self.failures % 2:
                raise
            self.events.append(StepFailed(step.step_id, error))


def executor(
    runner: FakeRunner, events: deque[object], depth: int, on_blocks_final: OnBlocksFinal | None = None
) -> LocalExecutor | LateExecutor:
    local = LocalExecutor(runner, on_blocks_final)
    return local if depth == 1 else LateExecutor(local, events)


class Room(RuleBasedStateMachine):
    """The queues between the parts are explicit; each rule moves one thing."""

    @initialize(
        p_blocks=st.integers(10, 30),
        d_blocks=st.integers(10, 30),
        slots=st.integers(1, 6),
        depth=st.integers(1, 2),
        spec=st.sampled_from(SPECS),
        p_ranks=st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]),
        d_ranks=st.sampled_from([(1, 1), (1, 1), (3, 1), (1, 3)]),
    )
    def start(
        self,
        p_blocks: int,
        d_blocks: int,
        slots: int,
        depth: int,
        spec: KVSpec,
        p_ranks: tuple[int, int],
        d_ranks: tuple[int, int],
    ) -> None:
        """`p_ranks`, `d_ranks`: context-parallel and data-parallel ones."""
        layout, windows, tables = KVLayout("fake", spec), spec.windows, spec.num_tables
        p_blocks = p_blocks // p_ranks[0] * p_ranks[0] * p_ranks[1] * tables
        d_blocks = d_blocks // d_ranks[0] * d_ranks[0] * d_ranks[1] * tables
        self.clock = MockClock()
        self.clients: dict[AttemptKey, Client] = {}
        self.to_p: deque[object] = deque()
        self.to_d: deque[object] = deque()
        p_runner, d_runner = FakeRunner(p_blocks, windows), FakeRunner(d_blocks, windows)
        self.runners = p_runner, d_runner
        wire = self.wire = FakeWire(p_runner, d_runner)
        wire.on_sender_event = self.to_p.append
        wire.on_receiver_event = self.to_d.append
        self.prefill = PrefillNode(
            core_parts(
                P_REF,
                layout,
                Scheduler(
                    SchedulerConfig(150, slots, 40, 40, depth=depth), BlockPool(p_blocks, tables, *p_ranks), windows
                ),
                executor(p_runner, self.to_p, depth, wire.sender.blocks_final),
                SendBuffer(self._from_p),
                self.clock,
                max_accepted=100,
            ),
            wire.sender,
        )
        self.decode = DecodeNode(
            core_parts(
                D_REF,
                layout,
                Scheduler(
                    SchedulerConfig(150, slots, 40, 8, depth=depth), BlockPool(d_blocks, tables, *d_ranks), windows
                ),
                executor(d_runner, self.to_d, depth),
                SendBuffer(self._from_d),
                self.clock,
                max_accepted=100,
            ),
            wire.receiver,
            early_s=5.0,
        )

    # ------------------------------------------------------------ the network

    def _from_p(self, messages: list[OutgoingMessage]) -> None:
        for out in messages:
            if isinstance(out, ToClient):
                self._to_router(out.message)
            else:
                self.to_d.append(FromClient(P_LINK, out.message))

    def _from_d(self, messages: list[OutgoingMessage]) -> None:
        for out in messages:
            assert isinstance(out, ToClient)
            if out.identity == P_LINK:
                self.to_p.append(FromPeer(D_REF.incarnation, out.message))
            else:
                self._to_router(out.message)

    def _to_router(self, message: Message) -> None:
        if isinstance(message, AttemptFailed):
            client = self.clients[message.key]
            client.failures += 1
            # What a router's flow does: the attempt is over on both nodes.
            self._abort_legs(message.key)
            return
        assert isinstance(message, TokenBatch)
        for chunk in message.chunks:
            client = self.clients[chunk.key]
            for offset, token in enumerate(chunk.token_ids):
                assert chunk.start + offset not in client.tokens, "a token came twice"
                client.tokens[chunk.start + offset] = token
            if chunk.finish_reason is not None:
                assert not client.finished, "finished twice"
                client.finished = True

    def _abort_legs(self, key: AttemptKey) -> None:
        self.to_p.append(FromClient(ROUTER, Abort(key)))
        self.to_d.append(FromClient(ROUTER, Abort(key)))

    # ------------------------------------------------------------ what may happen

    @rule(
        cut=st.integers(1, 64),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=30),
        max_tokens=st.integers(1, 30),
        local=st.booleans(),
    )
    def request(self, cut: int, tail: list[int], max_tokens: int, local: bool) -> None:
        key = AttemptKey(f"r{len(self.clients)}", 1)
        prompt = PREFIX[:cut] + tail
        client = self.clients[key] = Client(prompt, max_tokens)
        client.disturbed = any(isinstance(event, PeerGone) for event in self.to_p) or any(
            runner.fail_next for runner in self.runners
        )
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
        source = None if local else P_REF
        self.to_d.append(
            FromClient(ROUTER, DecodeRequest(key, EngineRequest(pack_ids(prompt), sampling), pack_ids(), source, 600.0))
        )
        if not local:
            self.to_p.append(
                FromClient(
                    ROUTER, PrefillRequest(key, EngineRequest(pack_ids(prompt), sampling), pack_ids(), D_REF, 600.0)
                )
            )

    @rule(count=st.integers(1, 6))
    def prefill_takes_events(self, count: int) -> None:
        for _ in range(min(count, len(self.to_p))):
            self.prefill.handle(self.to_p.popleft())

    @rule(count=st.integers(1, 6))
    def decode_takes_events(self, count: int) -> None:
        for _ in range(min(count, len(self.to_d))):
            self.decode.handle(self.to_d.popleft())

    @rule()
    def prefill_steps(self) -> None:
        self.prefill.on_time(self.clock())
        self.prefill.step()
        self.prefill.send_buffer.flush()

    @rule()
    def decode_steps(self) -> None:
        self.decode.on_time(self.clock())
        self.decode.step()
        self.decode.send_buffer.flush()

    @rule(blocks=st.integers(1, 5))
    def slices_move(self, blocks: int) -> None:
        for _ in range(blocks):
            self.wire.pump()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.clients, key=str)))
        self.clients[key].disturbed = True
        self._abort_legs(key)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 1))
    def step_fails(self, which: int) -> None:
        self.runners[which].fail_next = RuntimeError("made to fail")
        for client in self.clients.values():
            client.disturbed = client.disturbed or not client.finished

    @precondition(lambda self: self.clients)
    @rule()
    def decode_link_breaks(self) -> None:
        for client in self.clients.values():
            client.disturbed = client.disturbed or not client.finished
        self.to_p.append(PeerGone(D_REF.incarnation, "made to break"))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "prefill"):
            self.prefill.scheduler.check_integrity()
            self.decode.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        self.runners[0].fail_next = self.runners[1].fail_next = None
        for _ in range(3000):
            self.prefill_takes_events(100)
            self.decode_takes_events(100)
            self.prefill_steps()
            self.decode_steps()
            self.slices_move(20)
            idle = self.prefill.scheduler.is_idle() and self.decode.scheduler.is_idle()
            if idle and not (self.prefill.attempts or self.decode.attempts or self.to_p or self.to_d):
                break
        for key, client in self.clients.items():
            got = [client.tokens[index] for index in sorted(client.tokens)]
            assert got == client.expected[: len(got)], f"{key}: wrong tokens"
            if not client.disturbed:
                assert client.failures == 0, f"{key} failed"
                assert client.finished, f"{key} never finished"
                assert got == client.expected, f"{key} has too few tokens"
        assert not self.prefill.attempts, "the prefill node holds attempts that nobody wants"
        assert not self.decode.attempts, "the decode node holds attempts that nobody wants"
        assert self.prefill.scheduler.pool.num_used == 0
        assert self.decode.scheduler.pool.num_used == 0
        assert not self.wire.outgoing
        assert not self.wire.incoming


TestTwoNodes = Room.TestCase
TestTwoNodes.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
