"""A CUDA graph simulated on a CPU: captures the tensor operations of a function once, and replays only these.

As with a real graph nothing of Python is repeated: a shape, a list or a number that the function had at its first
call is what every replay has, and every operation reads and writes the memory of the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.engine.cuda_graphs import StepCapture


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    result: Any

    def repeat(self) -> None:
        again = self.function(*self.args, **self.kwargs)
        for old, new in zip(tree_leaves(self.result), tree_leaves(again), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Capturing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a captured step waits for a value on the host"
        result = func(*args, **(kwargs or {}))
        self.operations.append(_Operation(func, args, kwargs or {}, result))
        return result


class ReplayingCapture(StepCapture):
    """Replays the operations that a step called."""

    keeps_memory = True

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        with _Capturing() as capturing:
            run()

        def replay() -> None:
            for operation in capturing.operations:
                operation.repeat()

        return replay
