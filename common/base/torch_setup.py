"""Makes process-wide torch settings, once in each rank before it loads a model."""

from __future__ import annotations

import torch

from common.base.cores import usable_cores


def configure_torch(threads: int | None) -> int:
    """Set how many threads operations use (None: torch's choice, at most the usable cores), and flush denormals to zero. Returns the
    thread count.

    Denormal activations would make elementwise operations tens of times slower.
    """
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if threads is None else threads)
    torch.set_flush_denormal(True)
    return torch.get_num_threads()
