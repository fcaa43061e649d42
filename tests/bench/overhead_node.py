"""A decode node's engine side in this process: the node's real core, scheduler, executor and send buffer, no sockets.

The cost of a round besides the model's forward is Python code that holds the GIL, so the encoding of messages to the
router is counted too, although a real node does it on another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.base.clock import monotonic
from common.control.codec import encode
from common.control.identities import pack_ids
from common.control.messages import Abort, AttemptKey, DecodeRequest, EngineRequest, Grammar, PeerRef, SamplingParams
from common.engine.executor import LocalExecutor
from common.engine.loop import LOOK_S
from common.engine.scheduler import Scheduler
from common.engine.step import SampledToken, StepInput, StepOutput
from common.node.core import CoreParts
from common.node.events import FromClient, OutgoingMessage, SendBuffer
from common.node.parts import make_grammars
from common.node.plan import NodePlan
from decode_node.node import DecodeNode

GREEDY = SamplingParams(seed=1, max_tokens=1 << 30, temperature=0.0)
_WARM_UP_ROUNDS = 5


class StubRunner:
    """Computes nothing: what is left of a round is the engine's own work."""

    def launch(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> _Computed:
        """As `ModelRunner.launch`."""
        return _Computed(StepOutput(step.step_id, [SampledToken(1 + step.step_id % 7) for _ in step.samples], 0.0))


@dataclass(frozen=True)
class _Computed:
    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class NoTransfers:
    """Nothing is ever relayed here."""


class OverheadNode:
    """One measurement; the scheduler's pool is whole again when `measure` returns."""

    def __init__(self, plan: NodePlan, scheduler: Scheduler, runner: StubRunner) -> None:
        self._grammars = make_grammars(plan, post=lambda _: None)
        self._executor = LocalExecutor(runner)  # type: ignore[arg-type]
        self._send_buffer = SendBuffer(self._deliver)
        self._sent_bytes = 0
        self._look_at_s = 0.0
        parts = CoreParts(
            me=PeerRef("bench", "0" * 16, "none", ["none"]),
            layout=plan.layout,
            vocab_size=plan.model.vocab_size,
            scheduler=scheduler,
            executor=self._executor,
            grammars=self._grammars,
            send_buffer=self._send_buffer,
            clock=monotonic,
            max_accepted=1024,
            transfer_timeout_s=60.0,
        )
        self._node = DecodeNode(parts, NoTransfers(), early_s=3.0)  # type: ignore[arg-type]

    def measure(self, prompts: list[list[int]], steps: int, sampling: SamplingParams = GREEDY) -> dict[str, Any]:
        """Run all prompts until each has generated, then time `steps` rounds in which all of them decode."""
        # Long enough that none of them ends before all are running and all steps are timed.
        sampling = sampling._replace(max_tokens=steps + 2048)
        self._compile(sampling.grammar)
        keys = [AttemptKey(f"bench-{i}", 1) for i in range(len(prompts))]
        for key, prompt in zip(keys, prompts, strict=True):
            request = DecodeRequest(
                key, EngineRequest(pack_ids(prompt), sampling), pack_ids(), prefill=None, timeout_s=3600.0
            )
            self._node.handle(FromClient(b"router", request))
        scheduler = self._node.scheduler
        while scheduler.waiting or any(seq.num_uncomputed > 1 for seq in scheduler.running.values()):
            self._round()
        for _ in range(_WARM_UP_ROUNDS):
            self._round()
        assert len(scheduler.running) == len(prompts)
        busy_s = self._executor.busy_s
        started = time.perf_counter()
        for _ in range(steps):
            self._round()
        wall_s = time.perf_counter() - started
        forward_s = self._executor.busy_s - busy_s
        for key in keys:
            self._node.handle(FromClient(b"router", Abort(key)))
        self._send_buffer.flush()
        scheduler.pool.check_integrity()
        assert scheduler.pool.num_used == 0
        return {"wall_s": wall_s, "forward_s": forward_s, "steps": steps, "sent_bytes": self._sent_bytes}

    def _compile(self, grammar: Grammar | None) -> None:
        """Requests find their grammar compiled."""
        if grammar is not None:
            self._grammars.compile(AttemptKey("bench", 1), grammar.source)
            while self._grammars.cached(grammar.source) is None:
                time.sleep(0.01)
        self._grammars.close()

    def _round(self) -> None:
        """As one round of `EngineLoop`."""
        now_s = monotonic()
        if now_s >= self._look_at_s:
            self._node.on_time(now_s)
            self._look_at_s = now_s + LOOK_S
        assert self._node.step()
        self._send_buffer.flush()

    def _deliver(self, messages: list[OutgoingMessage]) -> None:
        self._sent_bytes += sum(len(encode(outgoing.message)) for outgoing in messages)
