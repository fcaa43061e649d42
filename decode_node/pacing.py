"""When a decode node rests between steps because prefill nodes compute on the same processor cores. Pure.

A step takes almost as long for one stream as for eight. Without rests, the first streams of a burst take half of the cores
from the prompts of the others, and the same steps are computed again for each stream that joins later.
"""

from __future__ import annotations

_LONGEST_S = 0.1


def rest_s(step_s: float, running: int, coming: int) -> float:
    """Seconds to rest after a step of `step_s` seconds with `running` streams, at least one, while the prompts of `coming`
    streams are computed elsewhere. A stream in prefill has the weight of a running one (docs/records/trials.md).
    """
    return min(_LONGEST_S, step_s * coming / running)
