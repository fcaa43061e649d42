"""What happens when a state machine meets an event, or a change of state, that its table does not have: a bug of ours.

In tests, and in the processes that they start, it raises with the story of what it happened to. In production it is logged
and counted, because one request's bug must not end the others; the caller then goes on as its own docstring says.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable

from common.base.errors import InvalidTransition
from common.base.variables import STRICT_STATES

log = logging.getLogger(__name__)

unlisted_counts: Counter[str] = Counter()
"""How often each unlisted event came in this process, by `machine: event`. The status of a service shows it."""


def unlisted(machine: str, event: str, about: object, story: Iterable[object]) -> None:
    """Report an event that the table of `machine` does not have.

    `event`: its kind and the state, such as "running -> reserved"; few different ones. `about`: what it happened to.
    `story`: what happened to that before, oldest first. Called only for bugs: it need not be fast.

    Raises: InvalidTransition if `STRICT_STATES` is set.
    """
    error = InvalidTransition(
        f"{machine} {about}: {event} is not in its table. Its story: {'; '.join(map(str, story))}"
    )
    if os.environ.get(STRICT_STATES):
        raise error
    unlisted_counts[f"{machine}: {event}"] += 1
    log.error("%s", error.message)
