"""What failures of torch.distributed say to operators. Pure."""

from __future__ import annotations

import re

_PLACE = re.compile(r"\[enforce fail at [^]]*\] .*?\. |\[[^]]*\.(?:cc|cpp|h|hpp):\d+\] ?")
"""A place in PyTorch's sources, as on the machine that built it, and the failed condition."""
_ADVICE = ". This is typically caused by a remote worker crashing"
"""Start of gloo's advice, which is left out: our messages name the rank that was lost."""


def torch_reason(error: BaseException) -> str:
    """The first line of the message, without where in PyTorch's sources it comes from unless it says nothing else."""
    line = str(error).partition("\n")[0]
    return _PLACE.sub("", line).partition(_ADVICE)[0] or line
