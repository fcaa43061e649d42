"""When Python's cyclic garbage collector may stop the router. Event loop of the router process.

A round takes a quarter of a microsecond for each object that it looks at, and nothing else runs meanwhile: the objects of
ten thousand remembered requests are a tenth of a second. Requests leave next to nothing behind that it must find. So it
looks at new objects only; at all of them when nothing ran for some seconds, or after a very long time.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

_NEW = 10_000
"""Objects more than before after which it looks at these: about two milliseconds."""
_NEVER = 2**31 - 1
_LOOK_EVERY_S = 1.0
_QUIET_LOOKS = 10
"""It is quiet when so many in a row found no request."""
_WORTH_IT, _AT_LAST = 20, 2_000
"""So many rounds over new objects are followed by one over all, when it is quiet; after so many, in any case."""


async def run(running: Callable[[], int]) -> None:
    """Decide when it works, until cancelled; then it works as before. `running()`: requests that it would stop."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW, _NEVER, _NEVER)
    quiet = 0
    try:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            quiet = 0 if running() else quiet + 1
            rounds = gc.get_count()[1]
            if rounds >= _AT_LAST or (rounds >= _WORTH_IT and quiet >= _QUIET_LOOKS):
                gc.collect()
    finally:
        gc.set_threshold(*before)
