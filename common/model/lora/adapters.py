"""The LoRA adapters in one rank's memory, and how they change its linear layers.

`load` runs on any thread and ends by entering the adapter in a dict; everything else runs on the rank's engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.native.kernels import NativeKernels
from common.model.build import Build, LinearPart
from common.model.formats.base import Linear
from common.model.lora.checkpoint import LoraCheckpoint
from common.model.lora.products import AdapterRuns, LayerProducts, NativeProducts, Products, Run, Term, TorchProducts


class AdaptedLinear:
    """A linear layer to whose outputs the adapters of a step's rows are added."""

    def __init__(self, base: Linear, products: Products, adapters: Adapters, parts: list[LinearPart]) -> None:
        self.base = base
        self._adapters = adapters
        self.parts = parts
        self.products = products

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The layer's outputs with those of adapters: `Linear.forward`."""
        y = self.base.forward(x, dtype)
        if self._adapters.runs is not None:
            self.products.add_(y, x, self._adapters.runs)
        return y


class Adapters:
    """One rank's adapters by id, and those of the present step's rows."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._linears: list[AdaptedLinear] = []
        self._ids: set[int] = set()
        native = build.kernels.native if isinstance(build.kernels, NativeKernels) else None
        self._make_products = TorchProducts if native is None else lambda: NativeProducts(native)
        self.runs: AdapterRuns | None = None
        """The present step's runs of rows with an adapter; None: it has none."""

    def adapt(self, base: Linear, parts: list[LinearPart]) -> AdaptedLinear:
        """Have `base` apply adapters: `Build.adapt`."""
        linear = AdaptedLinear(base, self._make_products(), self, parts)
        self._linears.append(linear)
        return linear

    def of_layer(self, linears: Sequence[Linear]) -> Callable[[], int | None]:
        """A function for a whole native layer with these linear layers. It returns the address of the present step's
        `LoraStruct`, None if the step has no adapters."""
        products = [each.products for each in linears if isinstance(each, AdaptedLinear)]
        of_layer = LayerProducts([each for each in products if isinstance(each, NativeProducts)])
        return lambda: None if self.runs is None else of_layer.address(self.runs)

    def load(self, adapter_id: int, checkpoint: LoraCheckpoint, digest: str) -> None:
        """Read this rank's part of an adapter, which steps may name from then on. `adapter_id`: never used before.

        Raises: ConfigError if it cannot be read, or if its weights are no longer those of `digest`.
        """
        tensors = checkpoint.read()
        if checkpoint.digest(tensors) != digest:
            raise ConfigError(f"{checkpoint.path} has changed since it was registered: unload it and load it again")
        layer = self._build.names.layer
        places = {f"{layer.format(number=number)}.{name}": (number, name) for number, name in tensors}
        for linear in self._linears:
            terms = [
                self._term(part, checkpoint.modules[place].scale, *tensors[place])
                for part in linear.parts
                if (place := places.get(part.name)) is not None
            ]
            if terms:
                linear.products.put(adapter_id, terms)
        self._ids.add(adapter_id)

    def _term(self, part: LinearPart, scale: float, a: Tensor, b: Tensor) -> Term:
        dtype, device = self._build.precision.wide, self._build.device
        own_a, own_b = a[:, slice(*part.inputs)], b[slice(*part.outputs)]
        return Term(own_a.to(device, dtype).contiguous(), own_b.to(device, dtype).contiguous(), scale, part.first)

    def drop(self, adapter_id: int) -> None:
        """Free an adapter's memory. No later step names it."""
        self._ids.discard(adapter_id)
        for linear in self._linears:
            linear.products.drop(adapter_id)

    def plan(self, adapter_ids: list[int], query_lens: list[int]) -> None:
        """The adapters of the step that comes next: one for each sequence, 0 for none; empty: none has one.

        Raises: ValueError for an adapter that is not in memory.
        """
        self.runs = None
        if not adapter_ids:
            return
        runs: list[Run] = []
        first = 0
        for adapter_id, count in zip(adapter_ids, query_lens, strict=True):
            if adapter_id and adapter_id not in self._ids:
                raise ValueError(f"adapter {adapter_id} is not in memory")
            if adapter_id and runs and runs[-1].adapter_id == adapter_id and runs[-1].hi == first:
                runs[-1] = Run(adapter_id, runs[-1].lo, first + count)
            elif adapter_id:
                runs.append(Run(adapter_id, first, first + count))
            first += count
        self.runs = AdapterRuns(runs) if runs else None
