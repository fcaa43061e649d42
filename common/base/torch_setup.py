"""Process-wide torch settings, made once by a node's rank before it loads a model."""

from __future__ import annotations

import torch


def configure_torch(threads: int | None) -> int:
    """Set how many threads operations use (None leaves torch's choice) and flush denormals to zero.

    Denormal activations make elementwise operations tens of times slower. Returns the thread count.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    return torch.get_num_threads()
