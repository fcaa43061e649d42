"""One client's pooling call: starts its parts and joins their vectors in order. Router process, event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.base.errors import BadRequest, KvRelayError
from router.pooling.part import CLIENT_LEFT, PoolOutcome, PoolPart
from router.pooling.work import PoolWork, split
from router.requests.dispatch import Dispatcher
from router.requests.queued_request import Siblings
from router.requests.story import Story


class PoolCall:
    """All parts of one call. Invariant: after `cancel`, none of them runs."""

    def __init__(self, dispatcher: Dispatcher, request_id: str, client_id: str, work: PoolWork) -> None:
        """Nothing runs before `run`. Raises: BadRequest if there are more parts than a router's queue takes."""
        state = dispatcher.state(work.model)
        ranges = split(work, len(state.fleets.by_role["prefill"]))
        if len(ranges) > dispatcher.config.max_waiting:
            raise BadRequest(
                f"the inputs have {work.num_tokens} tokens, which is too much for one request: send fewer in one",
                param="input",
            )
        deadline_s = dispatcher.new_deadline_s()
        self.parts: list[PoolPart] = []
        siblings = Siblings()
        for index, each in enumerate(ranges):
            part_id = request_id if len(ranges) == 1 else f"{request_id}-{index}"
            part_work = replace(work, inputs=work.inputs[each.start : each.stop])
            story = Story(part_id, client_id)
            story.add("arrived", data={"inputs": len(each), "prompt_tokens": part_work.num_tokens})
            part = PoolPart(
                part_id,
                part_work,
                state,
                max_attempts=dispatcher.config.max_attempts,
                deadline_s=deadline_s,
                on_end=self._on_end,
                story=story,
                siblings=siblings,
            )
            self.parts.append(part)
        self._dispatcher = dispatcher
        self._work = work
        self._running = len(self.parts)
        self._ended = asyncio.Event()
        """Every part has ended, or one with an error."""

    @property
    def attempts(self) -> int:
        """The largest number of attempts that one part needed."""
        return max((part.attempt for part in self.parts), default=0)

    @property
    def tried_tokens(self) -> int:
        """Tokens of the parts that a node got, whether it answered or not."""
        return sum(part.work.num_tokens for part in self.parts if part.attempt)

    async def run(self) -> list[bytes] | None:
        """The vectors of all inputs, in their order; None if the call was cancelled.

        A call that was cancelled before starts nothing. Raises: the error of the first part that failed; Overloaded,
        Unavailable if none was started.
        """
        try:
            if self._running:
                self._dispatcher.run_parts(self._work.model, self.parts, self._work.tenant, self._work.priority)
                await self._ended.wait()
            outcomes = [part.outcome or PoolOutcome() for part in self.parts]
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
        except KvRelayError as error:
            self.cancel(f"the call failed: {error.message}")
            raise
        vectors: list[bytes] = []
        for outcome in outcomes:
            if outcome.vectors is None:
                return None
            vectors += outcome.vectors
        return vectors

    def cancel(self, why: str = CLIENT_LEFT) -> None:
        """End all parts that still run. `why`: the reason that their stories give."""
        for part in self.parts:
            part.cancel(why)

    def _on_end(self, part: PoolPart) -> None:
        self._running -= 1
        if self._running == 0 or (part.outcome is not None and part.outcome.error is not None):
            self._ended.set()
