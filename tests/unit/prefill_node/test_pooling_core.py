"""The core of a pooling node, with a pooler that needs no model: batches, answers, refusals, aborts, load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.mock_clock import MockClock

from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    SamplingParams,
    TokenBatch,
    TokenChunk,
)
from common.control.pooling import PoolInput, PoolRequest, PoolResult
from common.node.events import ClientLost, FromClient, OutgoingMessage, SendBuffer
from prefill_node.pooling_core import PoolingNode, PoolLimits

ROUTER, OTHER = b"router", b"other"


class Pooler:
    """A vector is the sum of the token ids, as text."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.error: Exception | None = None

    def compute(self, batch: Sequence[tuple[PoolRequest, PoolInput]]) -> list[bytes]:
        if self.error is not None:
            raise self.error
        self.batches.append([each.token_ids for _, each in batch])
        return [str(sum(each.token_ids)).encode() for _, each in batch]


class Bench:
    """A core whose steps take 10 tokens and whose inputs take 8."""

    def __init__(self, max_accepted: int = 4) -> None:
        self.sent: list[OutgoingMessage] = []
        self.clock, self.pooler = MockClock(), Pooler()
        self.buffer = SendBuffer(self.sent.extend)
        self.core = PoolingNode(self.pooler.compute, PoolLimits(100, 8, 10, max_accepted), self.buffer, self.clock)

    def ask(self, name: str, *lengths: int, identity: bytes = ROUTER, timeout_s: float = 60.0) -> AttemptKey:
        key = AttemptKey(name, 1)
        inputs = [PoolInput(pack_ids([1] * length)) for length in lengths]
        self.core.handle(FromClient(identity, PoolRequest(key, inputs, timeout_s=timeout_s)))
        return key

    def run(self) -> list[PoolResult | AttemptFailed]:
        """Steps until there is no work; what was answered."""
        while self.core.step():
            pass
        self.buffer.flush()
        answers = [each.message for each in self.sent]
        self.sent.clear()
        self.core.on_time(self.clock())
        return answers  # type: ignore[return-value]


def test_inputs_of_several_requests_share_steps_of_bounded_size_and_come_back_in_order() -> None:
    bench = Bench()
    first, second = bench.ask("a", 4, 3, 5), bench.ask("b", 2, 8, 1)
    bench.core.on_time(bench.clock())
    assert (bench.core.load.waiting, bench.core.load.queued_tokens) == (2, 23)
    assert bench.run() == [PoolResult(first, [b"4", b"3", b"5"]), PoolResult(second, [b"2", b"8", b"1"])]
    assert [[len(each) for each in batch] for batch in bench.pooler.batches] == [[4, 3], [5, 2], [8, 1]]
    load = bench.core.load
    assert (load.running, load.waiting, load.queued_tokens, load.prompt_tokens) == (0, 0, 0, 23)
    assert not bench.core.has_deadlines


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([], "needs inputs"),
        ([PoolInput(pack_ids())], "has 0 tokens, not 1 to 8"),
        ([PoolInput(pack_ids([1] * 9))], "has 9 tokens, not 1 to 8"),
        ([PoolInput(pack_ids([1])), PoolInput(pack_ids([100]))], "outside the vocabulary of 100"),
        ([PoolInput(pack_ids([1, 1]), second_at=2)], "begins at 2 of 2"),
        ([PoolInput(pack_ids([1, 1])), PoolInput(pack_ids([1, 1]), second_at=-1)], "begins at -1 of 2"),
    ],
)
def test_what_cannot_be_computed_is_refused_whole(inputs: list[PoolInput], why: str) -> None:
    bench = Bench()
    bench.core.handle(FromClient(ROUTER, PoolRequest(AttemptKey("a", 1), inputs)))
    [refusal] = bench.run()
    assert isinstance(refusal, AttemptFailed)
    assert refusal.code == "invalid_request"
    assert why in refusal.message
    assert not bench.pooler.batches


def test_a_full_node_and_a_request_to_generate_are_refused() -> None:
    bench = Bench(max_accepted=1)
    bench.ask("a", 1)
    bench.ask("b", 1)
    request = EngineRequest(pack_ids([1]), SamplingParams(seed=0, max_tokens=1))
    bench.core.handle(FromClient(ROUTER, DecodeRequest(AttemptKey("c", 1), request, pack_ids(), None, 1.0)))
    answers = bench.run()
    assert [(each.key.request_id, getattr(each, "code", "")) for each in answers] == [
        ("b", "overloaded"),
        ("c", "invalid_request"),
        ("a", ""),
    ]


def test_aborted_expired_and_ownerless_requests_are_not_computed() -> None:
    bench = Bench()
    bench.core.handle(FromClient(ROUTER, Abort(bench.ask("aborted", 3))))
    bench.ask("expired", 3, timeout_s=1.0)
    lost = bench.ask("lost", 3, identity=OTHER)
    bench.core.handle(ClientLost(OTHER))
    kept = bench.ask("kept", 3)
    bench.clock.advance(2.0)
    bench.core.on_time(bench.clock())
    assert bench.run() == [
        AttemptFailed(lost, "unavailable", "the router was silent past its lease"),  # it may only have been slow
        PoolResult(kept, [b"3"]),
    ]
    assert len(bench.pooler.batches) == 1


@pytest.mark.parametrize("error", [RuntimeError("out of memory\nadvice"), ValueError("out of memory")])
def test_a_failed_step_fails_its_requests_and_the_node_goes_on(error: Exception) -> None:
    bench = Bench()
    bench.pooler.error = error
    key = bench.ask("a", 8, 8)
    assert bench.run() == [AttemptFailed(key, "engine_error", "the step failed: out of memory")]
    bench.pooler.error = None
    assert bench.run() == []
    again = bench.ask("b", 2)
    assert bench.core.describe_attempts()[0]["attempt"] == "b#1"
    assert bench.run() == [PoolResult(again, [b"2"])]


def test_of_an_unexpected_message_only_the_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench, chunk = Bench(), TokenChunk(AttemptKey("private", 1), 0, [17] * 1000)
    bench.core.handle(FromClient(OTHER, TokenBatch([chunk])))
    assert "TokenBatch from other" in caplog.text
    assert "private" not in caplog.text
