"""A simulated decode node: continuous batching, arriving KV, and local prefills. Pure.

Steps are not simulated one by one. While the batch stays the same, its context grows by one token per sequence and step,
so the time of k steps is quadratic in k; only changes of the batch are events. The step count is continuous: a sequence
that joins does not wait for the end of the running step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from common.control.messages import NodeLoad
from router.simulator.events import Events
from router.simulator.hardware import Shape
from router.simulator.node import NodeOwner, SimulatedNode
from router.simulator.request import SimRequest


class SimulatedDecodeNode(SimulatedNode):
    """Invariant: the blocks of a sequence, including those of its whole answer, are in use from its grant to its end."""

    role = "decode"

    def __init__(self, number: int, shape: Shape, events: Events, owner: NodeOwner) -> None:
        super().__init__(number, shape.decode_blocks, shape, events, owner)
        self._waiting: deque[SimRequest] = deque()
        """Offers and local prefills without blocks yet, in order."""
        self._slots = 0
        """Sequence slots in use: one per sequence that has blocks."""
        self._prompts: deque[SimRequest] = deque()
        """Local prefills that have their blocks; the first is being computed."""
        self._batch: list[tuple[float, int, SimRequest]] = []
        """Heap of (step at which it ends, number, request)."""
        self._context = 0.0
        """Context tokens of the batch."""
        self._step = 0.0
        self._generated = 0.0
        """Tokens generated until `_as_of_s`; `_step` and `_context` are those of the same time."""
        self._as_of_s = 0.0
        self._prompt_ends = math.inf
        """The step at which the first of `_prompts` is complete."""
        self._chunk_s = 0.0
        """Time that the first of `_prompts` adds to each step."""
        self._version = 0

    def load(self) -> NodeLoad:
        """The current load report. Sequences with blocks but incomplete KV wait, too."""
        self._advance()
        waiting = len(self._waiting) + self._slots - len(self._batch)
        prompts = [*self._prompts, *(each for each in self._waiting if each.prefill_node is None)]
        queued_tokens = sum(each.input_tokens for each in prompts)
        return self._report(len(self._batch), waiting, queued_tokens, self.step_s, int(self._generated))

    @property
    def step_s(self) -> float:
        """Duration of a step of the current batch."""
        hardware = self._hardware
        return (
            hardware.step_fixed_s
            + hardware.step_seq_s * len(self._batch)
            + hardware.step_token_s * self._context
            + self._chunk_s
        )

    def submit(self, request: SimRequest) -> None:
        """Give the request blocks as soon as there is room: an offer of a prefill node, or a local prefill."""
        self._waiting.append(request)
        self._admit()

    def join(self, request: SimRequest) -> None:
        """The KV is complete and the first token known."""
        self._advance()
        self._enter(request)
        self._schedule()
        self._owner.changed(self)

    def drop(self, request: SimRequest) -> None:
        """The request ended with its first token, at the prefill node."""
        if request.granted:
            self._leave(request)
        else:
            self._waiting.remove(request)
        self._admit()

    def _admit(self) -> None:
        waiting = self._waiting
        while waiting and self._slots < self._hardware.max_num_seqs:
            request = waiting[0]
            held = self.cache.take(request.hashes, request.private_blocks)
            if held is None:
                break
            waiting.popleft()
            self._slots += 1
            self.requests += 1
            request.decode_hit_blocks = held
            request.granted = True
            if request.prefill_node is None:
                request.hit_blocks = held
                self._prompts.append(request)
                if len(self._prompts) == 1:
                    self._begin_prompt()
            else:
                self._owner.granted(request)
        self._owner.changed(self)

    def _begin_prompt(self) -> None:
        """Spread the next local prefill over as many steps as it has chunks."""
        self._advance()
        if self._prompts:
            tokens, took_s = self._begin_prefill(self._prompts[0])
            chunks = -(-tokens // self._hardware.chunk_tokens)
            self._chunk_s = took_s / chunks
            self._prompt_ends = self._step + chunks
        else:
            self._chunk_s, self._prompt_ends = 0.0, math.inf
        self._schedule()

    def _enter(self, request: SimRequest) -> None:
        ends = self._step + request.output_tokens - 1
        heapq.heappush(self._batch, (ends, request.number, request))
        self._context += request.input_tokens + 1

    def _leave(self, request: SimRequest) -> None:
        self._slots -= 1
        request.granted = False
        self.cache.release(request.hashes, request.private_blocks)

    # -- the steps

    def _advance(self) -> None:
        """Count the steps since the last change."""
        elapsed_s = self._events.now_s - self._as_of_s
        self._as_of_s = self._events.now_s
        if elapsed_s <= 0 or not (self._batch or self._prompts):
            return
        size = len(self._batch)
        growth, step_s = self._hardware.step_token_s * size, self.step_s
        if growth > 0:
            steps = (math.sqrt(step_s * step_s + 2 * growth * elapsed_s) - step_s) / growth
        else:
            steps = elapsed_s / step_s
        self._step += steps
        self._context += steps * size
        self._generated += steps * size

    @property
    def _next_change(self) -> float:
        """The step at which the batch changes next; infinite if it does not."""
        return min(self._batch[0][0] if self._batch else math.inf, self._prompt_ends)

    def _schedule(self) -> None:
        """Schedule the next change of the batch, if nothing happens before it."""
        self._version += 1
        target = self._next_change
        if target == math.inf:
            return
        steps = max(0.0, target - self._step)
        growth = self._hardware.step_token_s * len(self._batch)
        self._events.after(steps * self.step_s + growth * steps * steps / 2, self._due, self._version)

    def _due(self, version: int) -> None:
        if version != self._version:
            return
        target = self._next_change
        self._advance()
        self._step = target  # exactly, without rounding errors
        ended: list[SimRequest] = []
        while self._batch and self._batch[0][0] <= target:
            request = heapq.heappop(self._batch)[2]
            self._context -= request.input_tokens + request.output_tokens
            ended.append(request)
        if not self._batch:
            self._context = 0.0
        for request in ended:
            self._leave(request)
        if self._prompt_ends <= target:
            self._prompt_done()
        self._schedule()
        for request in ended:
            request.finished_s = self._events.now_s
            self._owner.finished(request)
        self._admit()

    def _prompt_done(self) -> None:
        request = self._prompts.popleft()
        request.first_token_s = self._events.now_s
        self._owner.first_token(request)
        if request.output_tokens > 1:
            self._enter(request)
        else:
            self._leave(request)
        self._begin_prompt()
