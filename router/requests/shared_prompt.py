"""The samples of one prompt (`n` > 1) share its KV: one relay, then every other sample starts where the prompt's blocks are.

The first sample is placed like any request. Once a decode node has generated from the prompt's KV, that node is the
*holder*: the other samples go there without a prefill node. The holder's prefix cache gives them the prompt's full blocks, its
scheduler a copy of the last one (`KVAllocator.copy_begun_block`). Without a holder, after a failure too, one sample goes
first and the others wait for it. Pure; router process, event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from common.control.messages import PromptLogprobs


class SharedPrompt:
    """The samples of one prompt that have not ended. Invariant: while samples wait, one sample goes first."""

    def __init__(self) -> None:
        self.holder = ""
        """Incarnation of the decode node that has the prompt's KV; empty while none is known."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        """Log-probabilities of the prompt, computed for the first sample alone."""
        self._first = ""
        self._waiting: dict[str, Callable[[], None]] = {}
        self._request_ended = False

    def may_place(self, request_id: str, *, holder_usable: bool, wake: Callable[[], None]) -> bool:
        """Whether a sample may be placed now: at the holder, or as the first. If not, `wake` is called when it should ask again.

        A holder that is not usable any more is forgotten.
        """
        if self._request_ended:
            return False
        if not holder_usable:
            self.holder = ""
        if self.holder:
            return True
        if self._first in ("", request_id):
            self._first = request_id
            return True
        self._waiting[request_id] = wake
        return False

    def held_at(self, incarnation: str) -> None:
        """A decode node generated a token of some sample: it has the KV of the prompt."""
        if not self.holder:
            self.holder, self._first = incarnation, ""
            self._wake(len(self._waiting))

    def leave(self, request_id: str, *, ends_request: bool = False) -> None:
        """A sample has ended. If it went first and no node holds the prompt, the next one goes first.

        `ends_request`: it failed or was cancelled; the other samples will be cancelled too, and none is placed any more.
        """
        if ends_request:
            self._request_ended = True
            self._waiting.clear()
        self._waiting.pop(request_id, None)
        if self._first == request_id:
            self._first = ""
            self._wake(1)

    def _wake(self, count: int) -> None:
        for request_id in list(self._waiting)[:count]:
            wake = self._waiting.pop(request_id, None)
            if wake is not None:  # waking one sample may end others
                wake()
