"""Stories: what happened to each request, kept in a bounded ring for later questions. Router process, event loop.

Writing an event is one append; everything that costs more is done on reading. The events:

    arrived      the request was accepted: its sizes and the client's own id
    queued       it waits in the admission queue until the nodes have use for more requests
    refused      it would miss an objective: 429
    decision     an attempt was placed: the whole decision
    shares_prompt     it waits for the first sample of its prompt
    waiting_for_node  no node can serve it now; it waits for a node to return
    backoff      the next attempt waits before it is placed
    sent         a leg's request went to its node
    first_token  the first token for the client
    resumed      the first token of a later attempt
    handover     the decode node has taken over from the prefill node
    timeline     what a leg's node did and when, if someone watches
    leg_failed   a node reported that its leg failed
    node_lost    a node of the attempt was lost
    gap          a node skipped a token
    retry        another attempt follows
    outgrown     the answer fills its node's context, and goes on at a larger node if there is one
    stop_found   the text contains a stop string
    finished | failed | cancelled    the last event, with the usage
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from common.control.identities import AttemptKey
from router.requests.request import TraceContext

log = logging.getLogger(__name__)

TERMINAL = frozenset({"finished", "failed", "cancelled"})
_MAX_EVENTS = 200
"""Maximum number of events kept per request; beyond it, events in the middle are dropped and counted."""
_KEPT_HEAD = 100
_MAX_REASON_CHARS = 500
_MAX_TOKEN_TIMES = 2000
_STORY_BYTES, _EVENT_BYTES = 1000, 1000
"""Approximate size of a story, and of one event with all that it refers to."""


@runtime_checkable
class Explained(Protocol):
    """Data that is converted to plain data only when read, such as a decision."""

    def explain(self) -> dict[str, object]: ...


Data = Mapping[str, object] | Explained | None


class Story:
    """The events of one request. Invariant: its size is bounded."""

    __slots__ = (
        *("_clock", "_started_s", "arrived_at", "client_id", "events", "omitted", "request_id", "token_times"),
        *("logged", "trace"),
    )

    def __init__(self, request_id: str, client_id: str = "", *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.request_id = request_id
        self.client_id = client_id
        """The client's own id of the request; not unique."""
        self.trace: TraceContext | None = None
        self.logged = False
        """Every event is logged, too."""
        self.arrived_at = time.time()
        self.events: list[tuple[float, str, str, Data]] = []
        """(seconds since arrival, event, reason, data)"""
        self.omitted = 0
        self.token_times: array[float] | None = None
        """Seconds since arrival at which tokens were sent to the client, up to `_MAX_TOKEN_TIMES`; None if nobody watches."""
        self._clock = clock
        self._started_s = clock()

    def add(self, event: str, reason: str = "", data: Data = None) -> None:
        """Add an event. `data` must not change afterwards, because it is read later."""
        if len(reason) > _MAX_REASON_CHARS:
            reason = reason[:_MAX_REASON_CHARS]
        self.events.append((self._clock() - self._started_s, event, reason, data))
        if self.logged:
            self._log(event, reason)
        if len(self.events) > _MAX_EVENTS:
            del self.events[_KEPT_HEAD]
            self.omitted += 1

    def log_events(self) -> None:
        """Log the events so far, and every later one."""
        self.logged = True
        for _, event, reason, _ in self.events:
            self._log(event, reason)

    def _log(self, event: str, reason: str) -> None:
        attempt = sum(each[1] == "decision" for each in self.events)
        log.debug("%s: %s%s", AttemptKey(self.request_id, attempt), event, f": {reason}" if reason else "")

    def tokens(self) -> None:
        """Tokens were sent to the client."""
        if self.token_times is not None and len(self.token_times) < _MAX_TOKEN_TIMES:
            self.token_times.append(self._clock() - self._started_s)

    @property
    def over(self) -> bool:
        """The last event has happened."""
        return bool(self.events) and self.events[-1][1] in TERMINAL

    @property
    def size_bytes(self) -> int:
        """Approximate memory that it takes."""
        trace_bytes = sum(map(len, self.trace or ()))
        return _STORY_BYTES + trace_bytes + _EVENT_BYTES * len(self.events) + 4 * len(self.token_times or ())

    def summary(self) -> dict[str, Any]:
        """Everything except the events, as plain data."""
        last = self.events[-1] if self.events else (0.0, "", "", None)
        decided = next((_plain(data) for _, event, _, data in reversed(self.events) if event == "decision"), None)
        return {
            "request_id": self.request_id,
            "client_request_id": self.client_id,
            "arrived_at": self.arrived_at,
            "outcome": last[1] if self.over else "running",
            "duration_s": last[0] if self.over else self._clock() - self._started_s,
            "attempts": sum(event == "decision" for _, event, _, _ in self.events),
            "last_decision": decided,
            "usage": _plain(last[3]) if self.over else None,
        }

    def plain(self) -> dict[str, Any]:
        """Everything as plain data."""
        events = [
            {"t_s": round(t_s, 6), "event": event, "reason": reason, "data": _plain(data)}
            for t_s, event, reason, data in self.events
        ]
        times = [round(t_s, 6) for t_s in self.token_times or ()]
        return {**self.summary(), "events": events, "events_omitted": self.omitted, "token_times": times}


def _plain(data: Data) -> dict[str, object] | None:
    if data is None:
        return None
    return data.explain() if isinstance(data, Explained) else dict(data)


class Stories:
    """The stories of all running requests and of the last finished ones, bounded in number and bytes."""

    def __init__(self, max_finished: int = 10_000, max_bytes: int = 96 * 2**20) -> None:
        self._max_finished = max_finished
        self._max_bytes = max_bytes
        self._running: dict[str, Story] = {}
        self._finished: OrderedDict[str, tuple[Story, int]] = OrderedDict()
        self._bytes = 0
        self._watched_until_s = 0.0
        self._logged = log.isEnabledFor(logging.DEBUG)
        self.on_end: Callable[[Story], None] | None = None
        """Called with each finished story."""

    @property
    def watched(self) -> bool:
        """Someone looks at stories: those that begin now get timelines and the times of tokens."""
        return self.on_end is not None or time.perf_counter() < self._watched_until_s

    def watch(self, seconds: float = 60.0) -> None:
        """Someone looks at stories for at least this many seconds."""
        self._watched_until_s = max(self._watched_until_s, time.perf_counter() + seconds)

    def enter(self, story: Story) -> None:
        """Keep this story of a running request, until `end`."""
        self._running[story.request_id] = story
        if self._logged:
            story.log_events()

    def end(self, story: Story) -> None:
        """The request is over; the oldest finished stories are dropped if there are too many."""
        self._running.pop(story.request_id, None)
        size = story.size_bytes
        self._finished[story.request_id] = (story, size)
        self._bytes += size
        if self.on_end is not None:
            self.on_end(story)
        while self._finished and (len(self._finished) > self._max_finished or self._bytes > self._max_bytes):
            self._bytes -= self._finished.popitem(last=False)[1][1]

    def get(self, request_id: str) -> dict[str, Any] | None:
        """The whole story of a request, by its id or by the client's own id (the latest with that id); None if unknown.

        A request of several prompts has one story for each, under `choices`.
        """
        story = self._find(request_id)
        if story is not None:
            return story.plain()
        if (whole := self._choices(request_id)) is not None:
            return whole
        named = next((story for story in self._newest_first() if story.client_id == request_id), None)
        if named is None or not request_id:
            return None
        return self._choices(named.request_id.rpartition("-")[0]) or named.plain()

    def _choices(self, request_id: str) -> dict[str, Any] | None:
        """The stories of a request's prompts; None if it has only one, or is unknown."""
        choices: list[dict[str, Any]] = []
        while (story := self._find(f"{request_id}-{len(choices)}")) is not None:
            choices.append(story.plain())
        return {"request_id": request_id, "choices": choices} if choices else None

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Summaries of the latest `count` requests: the running ones, then the finished ones, newest first."""
        return [story.summary() for story, _ in zip(self._newest_first(), range(count), strict=False)]

    def _find(self, request_id: str) -> Story | None:
        story = self._running.get(request_id)
        if story is None and request_id in self._finished:
            story = self._finished[request_id][0]
        return story

    def _newest_first(self) -> list[Story]:
        return [*reversed(self._running.values()), *(story for story, _ in reversed(self._finished.values()))]
