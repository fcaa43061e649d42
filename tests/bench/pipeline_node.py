"""A decode node with several pipeline stages but without a service, and a single process that repeats its steps.

Worker classes. The node is real: leader, rank processes, scheduler, engine loop; messages to routers are only counted.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import psutil
from bench.overhead_node import NoTransfers

from common.base.clock import monotonic
from common.base.device import configure_torch
from common.config.service_configs import DecodeConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, DecodeRequest, EngineRequest, PeerRef, SamplingParams, TokenBatch
from common.engine.executor import Executor, StepDone
from common.engine.loop import EngineLoop
from common.engine.step import StepInput, StepOutput
from common.node.core import CoreParts
from common.node.events import FromClient, OutgoingMessage, SendBuffer, ToClient
from common.node.parts import make_grammars, make_pool, make_scheduler
from common.node.plan import plan_node
from common.node.profile_run import warm_up
from common.node.ranks.leader import Leader
from common.node.worker import load_worker
from common.parallel.mesh import SOLO
from decode_node.node import DecodeNode
from decode_node.role import ROLE

_KV_BLOCKS = 2048
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class _Moment:
    """`steps`: started so far; `busy`: (up, busy) seconds of every rank; `cpu_s`: processor time of all ranks."""

    steps: int
    busy: list[tuple[float, float]]
    cpu_s: float


def _nearest(moments: list[_Moment], steps: int) -> _Moment:
    return min(moments, key=lambda moment: abs(moment.steps - steps))


class _Recorder:
    """An executor that records every step, and the time of the first and the last stage for it."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._executor: Executor = leader.executor()
        self.steps: list[StepInput] = []
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}

    def submit(self, step: StepInput) -> StepOutput | None:
        self.steps.append(step)
        before_s = self._leader.busy()[0].busy_s
        output = self._executor.submit(step)
        self.first_s[step.step_id] = self._leader.busy()[0].busy_s - before_s
        return output

    def done(self, output: StepOutput) -> None:
        """On the thread that hears the ranks."""
        self.last_s[output.step_id] = output.forward_s


class PipelineNode:
    """One node of two stages; `measure` may be called again and again."""

    def __init__(self, folder: str, pp_layers: str) -> None:
        config = DecodeConfig(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            kv_blocks=_KV_BLOCKS,
            pp_layers=pp_layers,
            local_prefill_chunk=256,  # prompts are not measured, so they are computed quickly
        )
        plan = ROLE.plan(config)
        self._vocab_size = plan.model.vocab_size
        self._crash: BaseException | None = None
        self._changed = threading.Condition()
        self._requests = 0
        self._waiting: set[AttemptKey] = set()
        self._running: set[AttemptKey] = set()
        self._moments: list[_Moment] = []
        """After each round in which all requests generate."""
        self._leader = Leader(ROLE, plan)
        try:
            asyncio.run(self._leader.load())
            asyncio.run(self._leader.start_ranks("decode", "0" * 16, "none"))
            me = psutil.Process()
            self._processes = [me, *me.children()]
            self._recorder = _Recorder(self._leader)
            self._send_buffer = SendBuffer(self._on_round)
            parts = CoreParts(
                me=PeerRef("bench", "0" * 16, "none", ["none"]),
                layout=plan.layout,
                vocab_size=self._vocab_size,
                scheduler=make_scheduler(plan, make_pool(plan, self._leader.num_blocks)),
                executor=self._recorder,
                grammars=make_grammars(plan, post=lambda _: None),
                send_buffer=self._send_buffer,
                clock=monotonic,
                max_accepted=1024,
                transfer_timeout_s=60.0,
            )
            node = DecodeNode(parts, NoTransfers(), early_s=3.0)  # type: ignore[arg-type]
            self._engine = EngineLoop(node, self._send_buffer.flush, self._on_crash)
            self._leader.watch(self._on_step, lambda report: None, self._on_crash, lambda answer: None)
            self._engine.start()
        except BaseException:
            self._leader.close()
            raise

    def measure(self, requests: int, prompt: int, new_tokens: int, keep: int, record: str) -> dict[str, Any]:
        """Run that many requests at once. Returns per stage the seconds up and busy, of the whole run and of the part
        in which every request generates. About `keep` steps from the middle of that part go to the file `record`;
        `kept_s` is what each stage took for them, `kept_cpu_s` the processor time of both processes meanwhile."""
        rng = random.Random(requests)
        sampling = SamplingParams(seed=1, max_tokens=new_tokens, temperature=0.0)
        keys = [AttemptKey(f"bench-{i}", 1) for i in range(requests)]
        before = self._settled()
        self._requests = requests
        self._waiting, self._running, self._moments = set(keys), set(keys), []
        self._recorder.steps = []
        started = time.perf_counter()
        for key in keys:
            ids = [rng.randrange(self._vocab_size) for _ in range(prompt)]
            request = DecodeRequest(
                key, EngineRequest(pack_ids(ids), sampling), pack_ids(), prefill=None, timeout_s=_TIMEOUT_S
            )
            self._engine.post(FromClient(b"router", request))
        self._wait(lambda: not self._running)
        wall_s = time.perf_counter() - started
        whole = _between(before, self._settled())
        assert self._moments, "at no time did all requests generate"
        middle = self._moments[len(self._moments) // 2].steps
        first, last = (_nearest(self._moments, middle + offset) for offset in (-keep // 2, keep // 2))
        kept = self._recorder.steps[first.steps : last.steps]
        Path(record).write_bytes(pickle.dumps(kept))
        return {
            "wall_s": wall_s,
            "whole": whole,
            "steady": [_steady([moment.busy[rank] for moment in self._moments]) for rank in range(len(before))],
            "kept_s": [
                sum(took[step.step_id] for step in kept) for took in (self._recorder.first_s, self._recorder.last_s)
            ],
            "kept_cpu_s": last.cpu_s - first.cpu_s,
            "steps": len(self._recorder.steps),
            "kept": len(kept),
            "tokens": requests * new_tokens,
        }

    def _on_step(self, event: Any) -> None:
        """On the thread that hears the ranks."""
        if isinstance(event, StepDone):
            self._recorder.done(event.output)
        self._engine.post(event)

    def _on_round(self, messages: list[OutgoingMessage]) -> None:
        """On the engine's thread."""
        with self._changed:
            for outgoing in messages:
                assert isinstance(outgoing, ToClient), outgoing
                assert isinstance(outgoing.message, TokenBatch), outgoing
                for chunk in outgoing.message.chunks:
                    self._waiting.discard(chunk.key)
                    if chunk.finish_reason is not None:
                        self._running.discard(chunk.key)
            if not self._waiting and len(self._running) == self._requests:
                times = [process.cpu_times() for process in self._processes]
                cpu_s = sum(each.user + each.system for each in times)
                self._moments.append(_Moment(len(self._recorder.steps), self._busy(), cpu_s))
            self._changed.notify_all()

    def _on_crash(self, error: BaseException) -> None:
        with self._changed:
            self._crash = error
            self._changed.notify_all()

    def _busy(self) -> list[tuple[float, float]]:
        return [(busy.up_s, busy.busy_s) for busy in self._leader.busy()]

    def _wait(self, done: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._crash is not None or done(), _TIMEOUT_S):
                raise RuntimeError(f"{len(self._running)} requests did not end within {_TIMEOUT_S:.0f} s")
        if self._crash is not None:
            raise RuntimeError("the node crashed") from self._crash

    def _settled(self) -> list[tuple[float, float]]:
        """The ranks' reports while nothing runs. Waits for two heartbeats: the first may be older than the last step."""
        for _ in range(2):
            old = [up_s for up_s, _ in self._busy()]
            while any(new == up_s for (new, _), up_s in zip(self._busy(), old, strict=True)):
                time.sleep(0.05)
                self._wait(lambda: True)
        return self._busy()

    def close(self) -> None:
        """End the ranks."""
        self._engine.stop()
        self._leader.close()


def _between(old: list[tuple[float, float]], new: list[tuple[float, float]]) -> list[dict[str, float]]:
    return [
        {"up_s": up - old_up, "busy_s": busy - old_busy}
        for (old_up, old_busy), (up, busy) in zip(old, new, strict=True)
    ]


def _steady(seen: list[tuple[float, float]]) -> dict[str, float]:
    """From the first to the last report of the period, without the one before it. NaN for fewer than two reports."""
    fresh = [report for report in seen if report != seen[0]]
    if len(set(fresh)) < 2:
        return {"up_s": nan, "busy_s": nan}
    return _between([fresh[0]], [fresh[-1]])[0]


class SingleProcess:
    """The same model in one process of `threads` threads."""

    def __init__(self, folder: str, threads: int) -> None:
        config = DecodeConfig(model=folder, load_format="dummy", dtype="bfloat16", kv_blocks=_KV_BLOCKS)
        configure_torch(threads)
        worker = load_worker(plan_node(config), SOLO, small_batches=True)
        worker.allocate_kv(_KV_BLOCKS)
        self._runner = worker.runner
        self._runner.execute(warm_up())

    def replay(self, record: str) -> tuple[float, float]:
        """Seconds of forward, and of processor time, for the steps that `PipelineNode.measure` wrote."""
        steps: list[StepInput] = pickle.loads(Path(record).read_bytes())
        self._runner.execute(steps[0])
        before_s = time.process_time()
        forward_s = sum(self._runner.execute(step).forward_s for step in steps)
        return forward_s, time.process_time() - before_s
