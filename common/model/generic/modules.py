"""Modules that take the place of a class's own: they hold this rank's share of a layer, in packed weights, or make the class
compute a pipeline stage.

In a stage the class's forward runs as it is, with all layers in their places, because it chooses masks and rotary embeddings
by a layer's number; layers of other stages compute nothing. Run on a rank's engine thread, under inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from common.kernels.base import Kernels
from common.model.build import Build
from common.model.formats.base import Linear
from common.model.sharding import vocab_range
from common.parallel.mesh import Mesh


def as_one_operation(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """compute(x), which a recording of the step (`common.model.generic.recorded_step`) has as one operation."""
    return handle_torch_function(compute, (x,), x) if has_torch_function_unary(x) else compute(x)


class RowModule(nn.Module):
    """A module that computes each row by itself."""

    def __init__(self, of_rows: Callable[[Tensor], Tensor]) -> None:
        """`of_rows`: of [T, in], fresh."""
        super().__init__()
        self._of_rows = of_rows

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return as_one_operation(self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        if x.dim() == 3 and x.size(0) == 1:  # the rows of a step: other operations take longer
            return self._of_rows(x.squeeze(0)).unsqueeze(0)
        y = self._of_rows(x.reshape(-1, x.size(-1)))
        return y.view(*x.shape[:-1], y.size(-1))


class OwnNorm(RowModule):
    """An RMS norm over the last axis."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        """weight: as the kernels take it."""
        super().__init__(lambda rows: kernels.rms_norm(rows, weight, eps))
        self.weight = nn.Parameter(weight, requires_grad=False)


class PackedLinear(RowModule):
    """A linear layer whose every input and output feature this rank has, or that needs no exchange."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        """`dtype`: of activations."""
        super().__init__(linear.forward)
        self.weight = torch.empty(0, dtype=dtype)
        """Empty; some classes look at its dtype."""


class MergedColumns(PackedLinear):
    """Several layers of the same input as one product. Each is a `ColumnsOfMerged`, and the first that is called computes all."""

    def __init__(self, linear: Linear, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        """`sizes`: output features of each layer."""
        super().__init__(linear, dtype)
        self._parts = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def columns(self, x: Tensor, index: int) -> Tensor:
        """The outputs of layer `index` for x."""
        if self._input is not x or self._outputs[index] is None:
            y = self.forward(x)
            self._input, self._outputs = x, [y.narrow(-1, at, size) for at, size in self._parts]
        found = self._outputs[index]
        self._outputs[index] = None
        if not any(each is not None for each in self._outputs):
            self._input = None
        assert found is not None
        return found


class ColumnsOfMerged(nn.Module):
    """One of the layers of a `MergedColumns`."""

    def __init__(self, merged: MergedColumns, index: int) -> None:
        super().__init__()
        self._columns = merged.columns
        self._index = index
        self.weight = merged.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._columns(x, self._index)


class GatheredColumns(PackedLinear):
    """This rank computes output features [lo, hi) of `size`, and gets those of the others."""

    def __init__(self, linear: Linear, dtype: torch.dtype, lo: int, hi: int, size: int, mesh: Mesh) -> None:
        super().__init__(linear, dtype)
        self._lo, self._hi, self._size = lo, hi, size
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        whole = y.new_zeros(*y.shape[:-1], self._size)
        whole[..., self._lo : self._hi] = y
        return self._mesh.all_reduce(whole)


class SummedRows(PackedLinear):
    """This rank has some of the input features; the outputs are summed over the ranks."""

    def __init__(self, linear: Linear, dtype: torch.dtype, mesh: Mesh, own: slice | None = None) -> None:
        """`own`: this rank's input features, where it is given all of them."""
        super().__init__(linear, dtype)
        self._mesh = mesh
        self._own = own

    def forward(self, x: Tensor) -> Tensor:
        return self._mesh.all_reduce(super().forward(x if self._own is None else x[..., self._own]))


class SummedOutput(nn.Module):
    """A module that ranks share by parts; their outputs are summed."""

    def __init__(self, inner: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.inner = inner
        self._mesh = mesh

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return self._mesh.all_reduce(self.inner(*inputs, **options).contiguous())


class VocabularyShare(nn.Module):
    """An embedding whose rows ranks share."""

    def __init__(self, inner: nn.Module, build: Build) -> None:
        """`inner`: the class's embedding, which holds this rank's rows."""
        super().__init__()
        self.inner = inner
        place = build.mesh.place
        self._lo, self._hi = vocab_range(build.config.vocab_size, place.tp_size, place.tp_rank)
        self._mesh = build.mesh

    def forward(self, token_ids: Tensor) -> Tensor:
        elsewhere = (token_ids < self._lo) | (token_ids >= self._hi)
        rows = self.inner((token_ids - self._lo).masked_fill(elsewhere, 0))
        return self._mesh.all_reduce(rows.masked_fill(elsewhere[..., None], 0.0))


class NotHere(Exception):
    """The logits are on another rank."""


class PackedLMHead(nn.Module):
    """Logits in float32 of this rank's range of the vocabulary, gathered on the stage's `tp_rank` 0."""

    def __init__(self, linear: Linear, bias: Tensor | None, vocab_size: int, mesh: Mesh) -> None:
        """bias: [vocab]."""
        super().__init__()
        self._linear = linear
        self._bias = bias
        self._vocab_size = vocab_size
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, rows, hidden]. Returns [1, rows, vocab]. Raises: NotHere on the other ranks."""
        return as_one_operation(self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        logits = self._mesh.gather_columns(self._linear.forward(x[0], torch.float32))
        if logits is None:
            raise NotHere
        logits = logits[:, : self._vocab_size]
        return (logits if self._bias is None else logits.add_(self._bias))[None]


class StageDone(Exception):
    """Carries the hidden states of a stage's last layer out of the class's forward; the next stage takes over."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class SkippedLayer(nn.Module):
    """Takes the place of a layer of another stage."""

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        return hidden_states


class FirstLayer(nn.Module):
    """A stage's first layer, whose input is `received`, not what the class passes on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None
        return self.inner(received, *inputs, **options)


class LastLayer(nn.Module):
    """The last layer of a stage that is not the last one. Raises: StageDone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        output = self.inner(hidden_states, *inputs, **options)
        raise StageDone(output[0] if isinstance(output, tuple) else output)
