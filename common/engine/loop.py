"""The engine's thread: handles events, runs steps while there is work, hands messages over.

A node's core (`prefill_node.node`, `decode_node.node`) is a plain object that lives on this thread only.
Everything reaches it through `EngineLoop.post`; everything leaves through its send buffer.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from common.base.clock import monotonic, until_next
from common.base.errors import EngineError, RankLost

log = logging.getLogger(__name__)

_DEADLINE_WAIT_S, _IDLE_WAIT_S = 0.2, 5.0
"""Longest sleep without an event while the core has deadlines, and while it has none."""
LOOK_S = 0.02
"""Seconds between two calls of `on_time` while steps run. Called at each step it would take 2 % of a small model's steps."""


class EngineCore(Protocol):
    """The part of a node's core that the loop uses."""

    def handle(self, event: Any) -> None:
        """Handle one event. Must not raise for anything that came from outside."""
        ...

    def step(self) -> bool:
        """Run one step if there is work. Returns whether there was."""
        ...

    def on_time(self, now_s: float) -> None:
        """Check deadlines, and measure what other threads read. While steps run, called every 20 ms."""
        ...

    @property
    def has_deadlines(self) -> bool:
        """Whether `on_time` may have something to do before the next event."""
        ...

    @property
    def rests_until_s(self) -> float:
        """`step` may have work again then, without an event; a time in the past means nothing."""
        ...


@dataclass(frozen=True)
class _Question:
    put: Callable[[], None]


class EngineLoop:
    """Runs `core` on a thread of its own until `stop`. `flush` is called after every round.

    `on_crash(error)` is called once if the core raises, after which the process must end: RankLost, or a bug.
    `use_idle_time()` is called while there is neither an event nor a request; each call may delay an event by some
    milliseconds. It returns the seconds until it may be called again, None: never.
    """

    def __init__(
        self,
        core: EngineCore,
        flush: Callable[[], None],
        on_crash: Callable[[BaseException], None],
        use_idle_time: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._core = core
        self._flush = flush
        self._on_crash = on_crash
        self._use_idle_time = use_idle_time
        self._idle_work_at_s = -math.inf
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = False
        self.last_round_s = monotonic()
        """Start of the loop's latest round. `/health` and `Pong` judge the engine by it and by unfinished steps."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Any) -> None:
        """Pass one event to the core. Any thread."""
        self._inbox.put(event)

    def ask(self, question: Callable[[], Any]) -> Future[Any]:
        """Run `question` on the engine's thread, between two steps: the core may be read nowhere else."""
        answer: Future[Any] = Future()

        def put() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # a bug of the caller must not end the engine
                    answer.set_exception(error)

        self._inbox.put(_Question(put))
        return answer

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the step that is running. Raises: EngineError if that takes longer than `timeout_s`."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineError(f"the engine's step did not end within {timeout_s:.0f} s")

    def _run(self) -> None:
        """The rounds: receive, then `NodeCore.step` (schedule, forward, process), then send."""
        busy, look_at_s = False, -math.inf
        try:
            while not self._stopping:
                self._receive(wait=not busy)
                now_s = self.last_round_s = monotonic()
                if not busy or now_s >= look_at_s:
                    self._core.on_time(now_s)
                    look_at_s = now_s + LOOK_S
                was_busy, busy = busy, self._core.step()
                if was_busy and not busy:  # what it measures is read while this thread sleeps
                    self._core.on_time(monotonic())
                self._flush()
        except RankLost as error:
            self._on_crash(error)
        except BaseException as error:
            log.exception("the engine loop crashed")
            self._on_crash(error)

    def _receive(self, *, wait: bool) -> None:
        """Pass all events that have come to the core. wait: if there is none, do other work and sleep until one comes."""
        if wait and not self._core.has_deadlines and self._inbox.empty() and monotonic() >= self._idle_work_at_s:
            wait_s = self._use_idle_time()
            self._idle_work_at_s = math.inf if wait_s is None else monotonic() + wait_s
        try:
            event = self._inbox.get(timeout=self._wait_s()) if wait else self._inbox.get_nowait()
            while True:
                if isinstance(event, _Question):
                    event.put()
                elif event is not None:
                    self._core.handle(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _wait_s(self) -> float:
        rest_s = self._core.rests_until_s - monotonic()
        if rest_s > 0:
            return rest_s
        if self._core.has_deadlines:
            return _DEADLINE_WAIT_S
        now_s = monotonic()
        return min(until_next(_IDLE_WAIT_S, now_s), max(0.0, self._idle_work_at_s - now_s))
