"""The LoRA adapters in one rank's memory, and how they change its linear layers.

`load` runs on any thread and ends by entering the adapter in a dict; everything else runs on the rank's engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.base.errors import ConfigError
from common.kernels.base import Rotation
from common.kernels.native.kernels import NativeKernels
from common.model.build import Build, LinearPart
from common.model.decoder_layer import DecoderLayer, Layer
from common.model.formats.base import Linear
from common.model.lora.checkpoint import LoraCheckpoint
from common.model.lora.products import AdapterRuns, LayerProducts, NativeProducts, Products, Run, Term, TorchProducts
from common.model.native_layer import NativeLayer


class _CurrentStep:
    """The adapters of the step that runs."""

    runs: AdapterRuns | None = None
    """Runs of rows with an adapter; None: the step has none."""


class AdaptedLinear:
    """A linear layer to whose outputs the adapters of a step's rows are added."""

    def __init__(self, base: Linear, products: Products, step: _CurrentStep, parts: list[LinearPart]) -> None:
        self.base = base
        self._step = step
        self.parts = parts
        self.products = products

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The layer's outputs with those of adapters: `Linear.forward`."""
        y = self.base.forward(x, dtype)
        if self._step.runs is not None:
            self.products.add_(y, x, self._step.runs)
        return y


class _AdaptedLayer:
    """A whole native layer, to whose linear layers its kernels add the adapters of a step's rows."""

    def __init__(self, whole: NativeLayer, products: LayerProducts, step: _CurrentStep) -> None:
        self._whole = whole
        self._products = products
        self._step = step

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rotation,
        backend: AttentionBackend,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """Run the layer with the step's adapters: `DecoderLayer.forward`."""
        runs = self._step.runs
        lora = None if runs is None else self._products.address(runs)
        return self._whole.forward(x, delta, rope, backend, on_layer, lora)


class Adapters:
    """One rank's adapters by id, and those of the present step's rows."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._linears: list[AdaptedLinear] = []
        self._ids: set[int] = set()
        native = build.kernels.native if isinstance(build.kernels, NativeKernels) else None
        self._make_products = TorchProducts if native is None else lambda: NativeProducts(native)
        self._step = _CurrentStep()

    @property
    def are_in_step(self) -> bool:
        """Whether the step that runs has rows with an adapter."""
        return self._step.runs is not None

    def adapt(self, base: Linear, parts: list[LinearPart]) -> AdaptedLinear:
        """Have `base` apply adapters: `Build.adapt`."""
        linear = AdaptedLinear(base, self._make_products(), self._step, parts)
        self._linears.append(linear)
        return linear

    def attach(self, layer: DecoderLayer | NativeLayer) -> Layer:
        """The layer, whose linear layers are adapted, with adapters also where it is one whole native layer."""
        if not isinstance(layer, NativeLayer):
            return layer
        products = [each.products for each in layer.linears if isinstance(each, AdaptedLinear)]
        native = [each for each in products if isinstance(each, NativeProducts)]
        return _AdaptedLayer(layer, LayerProducts(native), self._step)

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
        self._step.runs = None
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
        self._step.runs = AdapterRuns(runs) if runs else None
