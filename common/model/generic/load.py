"""Fills a class's modules, built without weights, with this rank's share of the weights. Used while a rank loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from common.base.errors import ConfigError
from common.kernels.base import Kernels
from common.model.build import Build, Share
from common.model.description import multi_head
from common.model.generic.config import COLUMNS, EXPERTS, GATHERED, ROWS, SPLIT, TensorParallelPlan
from common.model.generic.library import load
from common.model.generic.modules import (
    ColumnsOfMerged,
    GatheredColumns,
    MergedColumns,
    OwnNorm,
    PackedLinear,
    PackedLMHead,
    SummedOutput,
    SummedRows,
    VocabularyShare,
)
from common.model.sharding import even_range
from common.model.tensor_files import Part

_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that are given the same input."""


_OFFSETS = (0.0, 1.0)
"""What classes add to the weight before they multiply with it."""
_SCALES = (1e-2, 1.0, 30.0)


class ModuleLoader:
    """Loads modules, by their names in the whole model."""

    def __init__(self, build: Build, model: nn.Module, plan: TensorParallelPlan) -> None:
        """`model`: on the meta device; modules that are left out stay there."""
        self._build = build
        self._model = model
        self._plan = plan
        self._place = build.mesh.place
        self._conv1d: type[nn.Module] = load("transformers.pytorch_utils").Conv1D

    def fill(self, name: str) -> None:
        """Load all that is in module `name`, and replace its linear layers and norms."""
        root = self._model.get_submodule(name)
        for inner, module in list(root.named_modules()):
            self._merge_layers(f"{name}.{inner}" if inner else name, module)
        for inner, module in list(root.named_modules()):
            full = f"{name}.{inner}" if inner else name
            if self._is_packed(module):
                self._model.set_submodule(full, self._linear(full, module))
            else:
                self._fill_own(full, module)
                if self._place.tp_size > 1 and self._plan.style(full) == EXPERTS:
                    self._model.set_submodule(full, SummedOutput(module, self._build.mesh))

    def _merge_layers(self, name: str, parent: nn.Module) -> None:
        """Replace linear layers of `parent` that get the same input by shares of one product."""
        for group in _MERGED:
            modules = [getattr(parent, each, None) for each in group]
            if not all(isinstance(each, nn.Linear) and self._is_packed(each) for each in modules):
                continue
            layers = cast("list[nn.Linear]", modules)
            names = [f"{name}.{each}" for each in group]
            styles = {self._plan.style(each) if self._place.tp_size > 1 else None for each in names}
            kinds = {(each.in_features, each.bias is None) for each in layers}
            if len(kinds) > 1 or len(styles) > 1 or not styles <= {None, "colwise"}:
                continue
            shares = [self._share(each, layer.out_features) for each, layer in zip(names, layers, strict=True)]
            has_bias = layers[0].bias is not None
            linear = self._build.column_linear(names, shares, layers[0].in_features, bias=has_bias)
            merged = MergedColumns(linear, self._build.precision.wide, [share.count for share in shares])
            for index, each in enumerate(names):
                self._model.set_submodule(each, ColumnsOfMerged(merged, index))

    def _is_packed(self, module: nn.Module) -> bool:
        """Whether it is a linear layer that computes in the activations' dtype; routers of experts may use another one."""
        is_linear = type(module) is nn.Linear or type(module) is self._conv1d
        return is_linear and module.weight.dtype == self._build.precision.wide

    def embedding(self, name: str, module: nn.Embedding, rows: Tensor) -> None:
        """Let the embedding look up in `rows`, of `Build.vocabulary`."""
        module.weight = _parameter(rows.to(self._build.precision.wide))
        if self._place.tp_size > 1:
            self._model.set_submodule(name, VocabularyShare(module, self._build))

    def lm_head(self, name: str, module: nn.Linear, tied: Tensor | None) -> None:
        """Replace the LM head. tied: [vocab_rows, hidden], the embedding where that is the same matrix."""
        build = self._build
        size = build.config.vocab_size
        bias = None if module.bias is None else build.read(f"{name}.bias", size).float()
        self._model.set_submodule(
            name, PackedLMHead(build.lm_head_linear(f"{name}.weight", tied), bias, size, build.mesh)
        )

    def _linear(self, name: str, module: nn.Module) -> nn.Module:
        build, place, mesh = self._build, self._place, self._build.mesh
        weight = module.weight
        assert isinstance(weight, Tensor)
        is_conv1d = type(module) is self._conv1d
        outputs, inputs = reversed(weight.shape) if is_conv1d else weight.shape
        has_bias = module.bias is not None
        style = self._plan.style(name) if place.tp_size > 1 else None
        dtype = build.precision.wide
        if style in ROWS:
            lo, hi = self._even(name, inputs)
            linear = build.row_linear(name, Share(inputs, lo, hi), outputs, bias=has_bias)
            return SummedRows(linear, dtype, mesh, slice(lo, hi) if style in SPLIT else None)
        if style == "packed_colwise":
            half = Share(outputs // 2, *self._even(name, outputs // 2))
            return PackedLinear(build.column_linear([name, name], [half, half], inputs, bias=has_bias), dtype)
        if style in GATHERED:
            lo, hi = even_range(outputs, place.tp_size, place.tp_rank)
            linear = build.column_linear([name], [Share(outputs, lo, hi)], inputs, bias=has_bias)
            return GatheredColumns(linear, dtype, lo, hi, outputs, mesh)
        return PackedLinear(build.column_linear([name], [self._share(name, outputs)], inputs, bias=has_bias), dtype)

    def _share(self, name: str, outputs: int) -> Share:
        """This rank's output features of a layer that is split by columns or not at all."""
        is_split = self._place.tp_size > 1 and self._plan.style(name) in COLUMNS
        return Share(outputs, *(self._columns(name, outputs) if is_split else (0, outputs)))

    def _columns(self, name: str, outputs: int) -> tuple[int, int]:
        """This rank's output features: those of its heads for keys and values, which ranks may hold in common."""
        attention = multi_head(self._build.config.layers[0])
        if name.endswith((".k_proj", ".v_proj")) and outputs % attention.num_kv_heads == 0:
            heads, width = self._build.heads(attention), outputs // attention.num_kv_heads
            return heads.kv_lo * width, heads.kv_hi * width
        return self._even(name, outputs)

    def _even(self, name: str, size: int) -> tuple[int, int]:
        if size % self._place.tp_size:
            raise ConfigError(
                f"tensor-parallel size {self._place.tp_size} does not divide the {size} features of {name}; "
                "use a size that does"
            )
        return even_range(size, self._place.tp_size, self._place.tp_rank)

    def _fill_own(self, name: str, module: nn.Module) -> None:
        """The module's own parameters and its buffers that files hold, not those of modules in it."""
        for key, parameter in list(module.named_parameters(recurse=False)):
            full = f"{name}.{key}"
            part = self._part(full, parameter) if self._place.tp_size > 1 else []
            tensor = self._read(full, tuple(parameter.shape), parameter.dtype, part)
            module.register_parameter(key, _parameter(tensor))
        for key, buffer in list(module.named_buffers(recurse=False)):
            if key not in module._non_persistent_buffers_set:
                tensor = self._read(f"{name}.{key}", tuple(buffer.shape), buffer.dtype, [])
                module.register_buffer(key, tensor)

    def _part(self, name: str, parameter: Tensor) -> list[Part]:
        """What this rank holds of a parameter; empty: all."""
        style = self._plan.style(name)
        shape = parameter.shape
        if style is None:
            return []
        if style in ROWS:
            return [Part(len(shape) - 1, *self._even(name, shape[-1]))] if len(shape) > 1 else []
        dim = max(0, len(shape) - 2)
        if style == "packed_colwise":
            half = shape[dim] // 2
            lo, hi = self._even(name, half)
            return [Part(dim, lo, hi), Part(dim, half + lo, half + hi)]
        if style == "colwise":
            return [Part(dim, *self._even(name, shape[dim]))]
        raise ConfigError(
            f"the tensor-parallel style {style} of {name} is not implemented; use --tensor-parallel-size 1"
        )

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, parts: list[Part]) -> Tensor:
        read: Callable[..., Tensor] = self._build.weights.read
        tensors = [read(name, shape, dtype, part) for part in parts or [None]]
        return (tensors[0] if len(tensors) == 1 else torch.cat(tensors, parts[0].dim)).to(self._build.device)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def replace_norms(root: Any, kernels: Kernels, dtype: torch.dtype) -> None:
    """Put our RMS norm in the place of a class's own norms that compute the same, as random rows show. Their weights are loaded.
    dtype: of activations."""
    adding = [kernels.with_norm_offset(offset) for offset in _OFFSETS]
    for name, module in list(root.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        parameters = dict(module.named_parameters())
        if "RMSNorm" not in type(module).__name__ or list(parameters) != ["weight"] or not isinstance(eps, float):
            continue
        weight = parameters["weight"].detach()
        if weight.is_meta or weight.dim() != 1:
            continue
        ours = [OwnNorm(of_offset, of_offset.norm_weight(weight), eps) for of_offset in adding]
        same = next((each for each in ours if _is_same(module, each, weight, dtype)), None)
        if same is not None:
            root.set_submodule(name, same)


def _is_same(theirs: nn.Module, ours: nn.Module, weight: Tensor, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(len(_SCALES), weight.size(0), generator=generator) * torch.tensor(_SCALES)[:, None]
    x = rows.to(weight.device, dtype)[None]
    expected, found = theirs(x), ours(x)
    if found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
