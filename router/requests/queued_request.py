"""A request that waits in a router, and the tenant whose fair share it counts against. Pure data."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

from common.control.messages import Adapter


class Tenant(NamedTuple):
    """The tenant and user whose share a request counts against. `user`, which clients choose, only divides the share of `name`."""

    name: str = ""
    """A hash of the API key, or the client's address where there are no keys."""
    user: str = ""

    @property
    def digest(self) -> str:
        """What nodes learn of the name."""
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest() if self.name else ""


NOBODY = Tenant()


class Siblings:
    """The samples, or the parts of a pooling call, of one client's request. Invariant: once one was admitted, none is refused.

    The client may have tokens already, and nodes have computed for it.
    """

    __slots__ = ("admitted", "begun")

    def __init__(self) -> None:
        self.admitted = False
        """Whether one of them was."""
        self.begun = False
        """Whether nodes were chosen for one of them."""


class QueuedRequest(NamedTuple):
    """A request that waits in the router, or is about to."""

    request_id: str
    prompt_tokens: int = 0
    answer_tokens: int = 0
    """Estimated length of the answer; before the request is queued, its limit."""
    deadline_s: float = math.inf
    priority: int = 0
    tenant: Tenant = NOBODY
    siblings: Siblings | None = None
    adapter: Adapter | None = None
    """Only nodes that serve it can run the request."""

    @property
    def tokens(self) -> int:
        """Estimated cost."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def may_be_refused(self) -> bool:
        """No sibling was admitted."""
        return self.siblings is None or not self.siblings.admitted
