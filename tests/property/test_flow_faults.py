"""A request's flow between simulated nodes, under random interleavings and faults."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import EngineError, Overloaded, PeerLost, Unavailable
from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    PeerRef,
    PrefillRequest,
    PromptLogprobs,
    SamplingParams,
    TokenChunk,
)
from router.requests.flow import Flow
from router.requests.flow_events import (
    Answer,
    AwaitNode,
    BackOff,
    Blame,
    Cancelled,
    Choose,
    Chunk,
    ClientGone,
    Emit,
    EmitPrompt,
    Event,
    Fail,
    Finish,
    Found,
    GiveUp,
    Instructions,
    LegFailed,
    NodeLost,
    NoNode,
    Queued,
    Ready,
    Release,
    SampleAwaited,
    Send,
    StopFound,
)
from router.requests.placed_request import State

PROMPT = [1, 2, 3]


SCORES = [PromptLogprobs(-1.0 * token, 1, [], []) for token in PROMPT[1:]]


def truth(index: int) -> int:
    return 1000 + index * 7


@dataclass
class Work:
    """What a node still has to generate for one attempt."""

    key: AttemptKey
    generated: int
    max_tokens: int
    waits_for: AttemptKey | None
    """A decode node starts only after the prefill node's token for this attempt."""
    scored: int | None
    """Log-probabilities of the prompt that were sent; None: not wanted."""


@dataclass
class FakeNode:
    role: str
    peer: PeerRef
    work: list[Work] = field(default_factory=list)
    link: deque[Event] = field(default_factory=deque)
    """Messages that it sent and the router has not received yet."""


class World:
    def __init__(self, data: st.DataObject, max_tokens: int, max_attempts: int, *, scores: bool) -> None:
        self.data = data
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, prompt_logprobs=1 if scores else None)
        self.flow = Flow("r", EngineRequest(pack_ids(PROMPT), sampling), max_attempts)
        self.scores: list[PromptLogprobs] | None = None
        self.scored = scores
        self.max_tokens, self.max_attempts = max_tokens, max_attempts
        self.born = 0
        self.lost: set[str] = set()
        self.asked: set[tuple[str, AttemptKey]] = set()
        self.nodes = [self.new_node(role) for role in ("prefill", "prefill", "decode", "decode")]
        self.emitted: list[int] = []
        self.terminal: Finish | Fail | Cancelled | None = None
        self.open_legs: Counter[tuple[str, AttemptKey]] = Counter()
        self.prefilled: set[AttemptKey] = set()
        self.faults = 0
        self.waits = False
        """The request waits for its turn, a sample, a node or the end of a backoff."""
        self.enough: int | None = None
        """With more tokens than this the current attempt does not count as a failure; None before it is placed."""
        self.fruitless = 0
        """Consecutive failed attempts."""
        self.blamed: set[str] = set()
        """Incarnations that failed since the last attempt that did not count as a failure."""

    def new_node(self, role: str) -> FakeNode:
        self.born += 1
        return FakeNode(role, PeerRef(f"{role}{self.born % 4}", f"inc{self.born}", "tcp://x", []))

    # -- the router's side

    def run(self, instructions: Instructions) -> None:
        events: deque[Event] = deque()
        self.carry_out(instructions, events)
        while events:
            self.carry_out(self.flow.handle(events.popleft()), events)

    def feed(self, event: Event) -> None:
        self.run(self.flow.handle(event))

    def carry_out(self, instructions: Instructions, events: deque[Event]) -> None:
        for instruction in instructions:
            assert self.terminal is None, f"{instruction} after {self.terminal}"
            match instruction:
                case Choose():
                    self.check_choose(instruction)
                    events.append(self.answer(instruction))
                case BackOff(wait_s):
                    assert self.flow.attempt > 1
                    assert wait_s > 0
                    self.waits = True
                case AwaitNode(wait_s):
                    assert self.flow.admitted
                    assert wait_s > 0
                    self.waits = True
                case Send(peer, message):
                    self.deliver_to_node(peer, message)
                case Release(incarnation, key):
                    self.open_legs[incarnation, key] -= 1
                    assert self.open_legs[incarnation, key] == 0
                case EmitPrompt(logprobs):
                    assert self.scores is None
                    self.scores = logprobs
                case Emit(token_ids):
                    assert self.scores == (SCORES if self.scored else None)
                    self.emitted += token_ids
                case Blame(incarnation):
                    assert incarnation in {asked for asked, _ in self.asked}
                    self.blamed.add(incarnation)
                case Finish() | Fail() | Cancelled():
                    self.attempt_is_over()
                    self.terminal = instruction
                    self.waits = False
                case _:
                    pass

    def attempt_is_over(self) -> None:
        if self.enough is not None:
            worth_it = len(self.emitted) > self.enough
            self.fruitless = 1 if worth_it else self.fruitless + 1
        self.enough = None

    def check_choose(self, choose: Choose) -> None:
        self.attempt_is_over()
        assert self.fruitless < self.max_attempts
        assert choose.last == (self.flow.attempt > 1 and self.fruitless == self.max_attempts - 1)
        assert choose.avoid <= self.lost | self.blamed, "only those that failed are avoided"
        assert choose.is_new or self.flow.admitted

    def wake(self) -> None:
        if self.waits:
            self.waits = False
            self.feed(Ready())

    def answer(self, choose: Choose) -> Answer:
        kinds = ["found", "found", "sample", *(["queued"] if choose.is_new else ["no node"])]
        kind = self.data.draw(st.sampled_from(kinds))
        self.waits = kind in ("sample", "queued")
        if kind == "queued":
            return Queued()
        if kind == "sample":
            return SampleAwaited()
        if kind == "no node":
            return NoNode(Unavailable("none"), 0.0, rejoining=False)
        prefill = self.data.draw(st.sampled_from([*self.of_role("prefill"), None]))
        decode = self.data.draw(st.sampled_from(self.of_role("decode")))
        return Found(None if prefill is None else prefill.peer, decode.peer, 10.0)

    def deliver_to_node(self, peer: PeerRef, message: object) -> None:
        node = next((node for node in self.nodes if node.peer == peer), None)
        if isinstance(message, Abort):
            if node is not None:
                node.work = [work for work in node.work if work.key != message.key]
            return
        assert isinstance(message, PrefillRequest | DecodeRequest)
        if isinstance(message, DecodeRequest):
            self.enough = len(self.emitted) + (message.prefill is not None)
        self.asked.add((peer.incarnation, message.key))
        self.open_legs[peer.incarnation, message.key] += 1
        assert self.open_legs[peer.incarnation, message.key] == 1
        assert message.token_ids.tolist() == PROMPT + self.emitted
        assert message.request.prompt_ids == pack_ids(PROMPT)
        assert node is not None
        known = len(self.emitted)
        relayed = isinstance(message, DecodeRequest) and message.prefill is not None
        waits = message.key if relayed else None
        sampling = message.request.sampling
        assert (sampling.prompt_logprobs is not None) == (self.scored and self.scores is None)
        scored = None if relayed or sampling.prompt_logprobs is None else 0
        node.work.append(Work(message.key, known + relayed, sampling.max_tokens, waits, scored))

    # -- the nodes' side

    def of_role(self, role: str) -> list[FakeNode]:
        return [node for node in self.nodes if node.role == role]

    def compute(self, node: FakeNode, count: int = 1) -> None:
        """One step of one node: it sends the next tokens of its first sequence that can continue."""
        for work in node.work:
            if work.waits_for is not None and work.waits_for not in self.prefilled:
                continue
            start = work.generated
            end = min(work.max_tokens, start + (1 if node.role == "prefill" else count))
            if start >= end:
                continue
            if work.scored is not None and work.scored < len(SCORES):
                part = SCORES[work.scored : work.scored + count]
                chunk = TokenChunk(work.key, work.scored, [], prompt_logprobs=part)
                work.scored += len(part)
                node.link.append(Chunk(node.peer.incarnation, chunk))
                return
            work.generated = end
            finish = "length" if end == work.max_tokens else None
            chunk = TokenChunk(work.key, start, [truth(i) for i in range(start, end)], finish_reason=finish)
            node.link.append(Chunk(node.peer.incarnation, chunk))
            if node.role == "prefill":
                self.prefilled.add(work.key)
            if finish or node.role == "prefill":
                node.work.remove(work)
            return

    def hear(self, node: FakeNode) -> None:
        if node.link:
            self.feed(node.link.popleft())

    def kill(self, node: FakeNode) -> None:
        self.faults += 1
        self.nodes[self.nodes.index(node)] = self.new_node(node.role)
        self.lost.add(node.peer.incarnation)
        self.feed(NodeLost(node.peer.incarnation, "killed"))

    def fail_leg(self, node: FakeNode) -> None:
        if node.work:
            self.faults += 1
            key = node.work.pop(0).key
            code = self.data.draw(st.sampled_from([EngineError.code, PeerLost.code, Overloaded.code, "never heard of"]))
            node.link.append(LegFailed(node.peer.incarnation, AttemptFailed(key, code, "scripted")))

    def drop(self, node: FakeNode) -> None:
        """Lose a chunk that another one follows, which makes a gap."""
        chunks = [said for said in node.link if isinstance(said, Chunk)]
        if node.role == "decode" and len(chunks) >= 2 and chunks[0].chunk.key == chunks[-1].chunk.key:
            self.faults += 1
            node.link.remove(chunks[0])

    def repeat(self, node: FakeNode) -> None:
        if node.link:
            node.link.appendleft(node.link[0])

    def finish_undisturbed(self) -> None:
        for _ in range(1000):
            if self.terminal is not None:
                return
            self.wake()
            for node in list(self.nodes):
                self.compute(node)
                self.hear(node)
        raise AssertionError(f"stuck in {self.flow.state}")


ACTIONS = ["compute"] * 6 + ["hear"] * 6 + ["wake"] * 3 + ["kill", "fail", "drop", "repeat"]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), max_tokens=st.integers(1, 8), max_attempts=st.integers(1, 4), scores=st.booleans())
def test_whatever_happens_the_tokens_are_exact_and_the_request_ends_once(
    data: st.DataObject, max_tokens: int, max_attempts: int, *, scores: bool
) -> None:
    world = World(data, max_tokens, max_attempts, scores=scores)
    world.run(world.flow.start())
    ended_by_us: Event | None = None
    for _ in range(data.draw(st.integers(0, 60))):
        node = world.nodes[data.draw(st.integers(0, 3))]
        match data.draw(st.sampled_from(ACTIONS)):
            case "compute":
                world.compute(node, data.draw(st.integers(1, 3)))
            case "hear":
                world.hear(node)
            case "wake":
                world.wake()
            case "kill":
                world.kill(node)
            case "fail":
                world.fail_leg(node)
            case "drop":
                world.drop(node)
            case _:
                world.repeat(node)
    if data.draw(st.booleans()):
        ended_by_us = data.draw(st.sampled_from([ClientGone(), StopFound()]))
        world.feed(ended_by_us)
    else:
        world.finish_undisturbed()

    assert world.flow.state is State.DONE
    assert world.terminal is not None
    assert world.emitted == [truth(i) for i in range(len(world.emitted))]
    assert not +world.open_legs
    if world.terminal == Finish("length"):
        assert world.scores == (SCORES if scores else None)
        assert len(world.emitted) == max_tokens
    elif ended_by_us is None:
        assert isinstance(world.terminal, Fail), world.terminal
        assert world.fruitless == max_attempts, "attempts that brought tokens do not count"
        assert world.faults >= max_attempts
    if ended_by_us is None:
        # No node still works on a request that has ended.
        assert not [work for node in world.nodes for work in node.work]
    for event in (ClientGone(), StopFound(), GiveUp(Unavailable("late")), NodeLost("inc1", "late")):
        assert world.flow.handle(event) == []
