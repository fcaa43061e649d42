"""The products that adapters add to a linear layer's outputs, by PyTorch's operations or by the native kernels.

`put` is called on the thread that loads an adapter, the rest on the rank's engine thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from common.kernels.native.library import DTYPES, LoraRunStruct, LoraStruct, LoraTermStruct, NativeLibrary

_PANEL = 32
"""Outputs of a panel of B in the native kernels."""


@dataclass(frozen=True)
class Term:
    """scale * (x A^T) B^T, for some outputs of a linear layer; this rank's part of it."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float
    first: int
    """The first of the outputs."""


class Run(NamedTuple):
    """Neighbouring rows [lo, hi) of a step with the same adapter."""

    adapter_id: int
    lo: int
    hi: int


class AdapterRuns:
    """The rows of one step that have adapters; never empty."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.ids = tuple(run.adapter_id for run in runs)
        self.structs = (LoraRunStruct * len(runs))(*((run.lo, run.hi) for run in runs))


class TorchProducts:
    """The terms of one linear layer, by adapter; the products by PyTorch's operations."""

    def __init__(self) -> None:
        self._terms: dict[int, list[Term]] = {}

    def put(self, adapter_id: int, terms: list[Term]) -> None:
        """Keep an adapter's terms, whose outputs do not overlap."""
        self._terms[adapter_id] = terms

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter, if it has terms here."""
        self._terms.pop(adapter_id, None)

    def add_(self, y: Tensor, x: Tensor, runs: AdapterRuns) -> None:
        """Add each run's terms to its rows. y: [T, out]; x: [T, in]."""
        for adapter_id, lo, hi in runs.runs:
            for term in self._terms.get(adapter_id, ()):
                part = y[lo:hi, term.first : term.first + term.b.size(0)]
                inner = F.linear(x[lo:hi].to(term.a.dtype), term.a).mul_(term.scale)
                part += F.linear(inner, term.b)


class NativeProducts:
    """`TorchProducts` by the native kernels: one call for all terms of a step."""

    def __init__(self, native: NativeLibrary) -> None:
        self._native = native
        self._terms: dict[int, list[Term]] = {}
        """With B in panels: [out / 32, rank, 32]."""
        self._structs: dict[int, list[tuple[float, ...]]] = {}
        self._latest: tuple[tuple[int, ...], ctypes.Array[LoraTermStruct]] = (), (LoraTermStruct * 0)()
        """The adapters of the latest step's runs, and their terms."""

    def put(self, adapter_id: int, terms: list[Term]) -> None:
        kept: list[Term] = []
        structs: list[tuple[float, ...]] = []
        for term in terms:
            out = term.b.size(0)
            panels = F.pad(term.b, (0, 0, 0, -out % _PANEL)).unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()
            kept.append(Term(term.a, panels, term.scale, term.first))
            rank, inputs = term.a.shape
            structs.append((term.a.data_ptr(), panels.data_ptr(), term.scale, rank, inputs, out, term.first))
        self._terms[adapter_id], self._structs[adapter_id] = kept, structs

    def drop(self, adapter_id: int) -> None:
        self._terms.pop(adapter_id, None)
        self._structs.pop(adapter_id, None)

    def terms(self, runs: AdapterRuns) -> ctypes.Array[LoraTermStruct]:
        """The terms of the runs."""
        if self._latest[0] != runs.ids:
            found = [(*struct, at) for at, each in enumerate(runs.ids) for struct in self._structs.get(each, ())]
            self._latest = runs.ids, (LoraTermStruct * len(found))(*found)
        return self._latest[1]

    def add_(self, y: Tensor, x: Tensor, runs: AdapterRuns) -> None:
        terms = self.terms(runs)
        if not len(terms):
            return
        native, x = self._native, x if x.stride(-1) == 1 else x.contiguous()
        inputs = DTYPES[x.dtype], x.data_ptr(), x.stride(0)
        outputs = y.data_ptr(), DTYPES[y.dtype], y.stride(0)
        native.lora_add(native.team, terms, len(terms), runs.structs, *inputs, *outputs)


Products = TorchProducts | NativeProducts


class LayerProducts:
    """The terms of a whole native layer, for its kernels."""

    def __init__(self, linears: Sequence[NativeProducts]) -> None:
        """`linears`: q, k and v; output; gate and up; down."""
        self._linears = linears
        self._struct = LoraStruct()
        self._ids: tuple[int, ...] = ()

    def address(self, runs: AdapterRuns) -> int:
        """Address of the `LoraStruct` of a step, until the next call."""
        struct = self._struct
        if self._ids != runs.ids:
            for index, linear in enumerate(self._linears):
                terms = linear.terms(runs)
                struct.counts[index], struct.terms[index] = len(terms), ctypes.addressof(terms)
            self._ids = runs.ids
        struct.runs = ctypes.addressof(runs.structs)
        return ctypes.addressof(struct)
