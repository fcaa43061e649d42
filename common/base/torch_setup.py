"""Makes process-wide torch settings, once in each rank before it loads a model."""

from __future__ import annotations

import torch


def configure_torch(threads: int | None) -> int:
    """Set how many threads operations use (None keeps torch's choice), and flush denormals to zero. Returns the thread count.

    Denormal activations would make elementwise operations tens of times slower.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    return torch.get_num_threads()
