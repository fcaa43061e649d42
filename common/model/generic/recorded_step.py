"""A class's forward call as a flat list of tensor operations, recorded once for each number of rows.

Most of a small step's time is Python: module calls, reading configurations, arguments that are the same in every step. A
recording keeps the calls of tensor operations, in order; replaying them computes the same numbers. Where Python looks at the
values of tensors, nothing can be recorded. Runs on a rank's engine thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

MAX_ROWS = 64
"""Larger steps spend little of their time in Python."""
_READS = frozenset(
    {
        *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__"),
        *("nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal", "allclose", "__array__"),
    }
)
"""Functions whose results, or the shapes of these, depend on values."""
_VIEWS = frozenset({"view", "transpose", "narrow", "unsqueeze", "squeeze"})
"""Functions that give the same memory for the same arguments, so that one call serves for all."""
_TENSOR = re.compile(r"\bt\d+\b")

Call = Callable[..., Tensor]
"""Computes one tensor from a step's tensors."""


class RecordedSteps:
    """Calls `call` at first, and its recording once that has given the same."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_fit = True
        self._tried: dict[int, Call] = {}
        """By the number of rows: recordings that have not run yet."""
        self._recorded: dict[int, Call] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """inputs: [rows, ...] each."""
        rows = inputs[0].size(0)
        recorded = self._recorded.get(rows)
        if recorded is not None:
            return recorded(*inputs)
        if not self._is_fit or rows > MAX_ROWS:
            return self._call(*inputs)
        if rows not in self._tried:
            return self._record(rows, inputs)
        output = self._call(*inputs)
        recorded = self._tried.pop(rows)
        if torch.equal(recorded(*inputs), output):
            self._recorded[rows] = recorded
        else:
            self._refuse("its recording gives other numbers")
        return output

    def _record(self, rows: int, inputs: Sequence[Tensor]) -> Tensor:
        try:
            output, self._tried[rows] = record(self._call, inputs)
        except CannotRecord as error:
            self._refuse(f"it calls {error}")
            return self._call(*inputs)
        return output

    def _refuse(self, why: str) -> None:
        self._is_fit = False
        self._recorded.clear()
        self._tried.clear()
        log.info("steps of this class are not recorded, which makes small ones slower: %s", why)


class CannotRecord(Exception):
    """The call depends on the values of tensors; the message names the function."""


def record(call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Call]:
    """The result of `call(*inputs)`, and a function that computes it from other tensors of the same shapes.

    Raises: CannotRecord.
    """
    recorder = _Recorder(inputs)
    with recorder:
        output = call(*inputs)
    return output, recorder.compiled(inputs, output)


class _Recorder(TorchFunctionMode):
    """Writes each call that makes or changes tensors as a line of Python."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._names = {id(each): f"i{number}" for number, each in enumerate(inputs)}
        self._lines: list[str] = []
        self._views: dict[str, str] = {}
        """Names of views by the calls that made them."""
        self._kept: dict[str, Any] = {}
        """Functions, weights and other arguments by their names in the lines."""
        self._alive: list[Any] = list(inputs)
        """Keeps everything alive that `_names` refers to."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS or (name == "where" and len(args) + len(kwargs) == 1):
            raise CannotRecord(name)
        if name == "__getitem__" and _has_masks(args[1]):
            raise CannotRecord("a mask as an index")
        result = func(*args, **kwargs)
        is_change = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
        if is_change or _has_tensors(result):
            words = [self._word(each) for each in args]
            words += [f"{key}={self._word(value)}" for key, value in kwargs.items()]
            line = f"{self._keep(func)}({', '.join(words)})"
            if name in _VIEWS and line in self._views:
                self._names[id(result)] = self._views[line]
                self._alive.append(result)
            elif is_change or not args or result is not args[0]:
                target = self._targets(result)
                self._lines.append(f"{target} = {line}")
                if name in _VIEWS:
                    self._views[line] = target
        return result

    def _targets(self, result: Any) -> str:
        if isinstance(result, (tuple, list)):
            return f"[{', '.join(self._targets(each) for each in result)}]"
        name = f"t{len(self._alive)}"
        self._alive.append(result)
        if isinstance(result, Tensor):
            self._names[id(result)] = name
        return name

    def _word(self, value: Any) -> str:
        """An expression for an argument."""
        if isinstance(value, slice):
            return f"slice({self._word(value.start)}, {self._word(value.stop)}, {self._word(value.step)})"
        if type(value) is tuple:
            return f"({''.join(self._word(each) + ', ' for each in value)})"
        if type(value) is list:
            return f"[{', '.join(self._word(each) for each in value)}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._keep(value)

    def _keep(self, value: Any) -> str:
        """The name of a tensor of the recording, or of anything that stays as it is."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"k{len(self._kept)}"
            self._kept[name] = value
            self._alive.append(value)
        return name

    def compiled(self, inputs: Sequence[Tensor], output: Tensor) -> Call:
        """The lines as a function, in which each tensor is freed after its last use."""
        lines = [*self._lines, f"return {self._names[id(output)]}"]
        last_use = {name: number for number, line in enumerate(lines) for name in _TENSOR.findall(line)}
        body: list[str] = []
        for number, line in enumerate(lines):
            done = [name for name in dict.fromkeys(_TENSOR.findall(line)) if last_use[name] == number]
            body += [line, f"del {', '.join(done)}"] if done and number < len(lines) - 1 else [line]
        names = ", ".join(self._names[id(each)] for each in inputs)
        source = "\n    ".join([f"def replay({names}):", *body])
        scope = dict(self._kept)
        exec(compile(source, "<recorded step>", "exec"), scope)  # noqa: S102 - its own recording
        return scope["replay"]


def _has_masks(index: Any) -> bool:
    """Whether an index chooses by truth values, so that the values say how much."""
    if isinstance(index, (tuple, list)):
        return any(_has_masks(each) for each in index)
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _has_tensors(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return any(_has_tensors(each) for each in result)
    return isinstance(result, Tensor)
