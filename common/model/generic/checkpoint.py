"""A checkpoint's tensors under the names, and in the shapes, that a class of transformers gives its parameters.

Used by a rank's main thread while it loads.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.model.formats.floating import read_floating
from common.model.generic.library import load
from common.model.tensor_files import Part, TensorFiles
from common.model.weights import WeightSource


@dataclass
class _Sources:
    """What a parameter is made from: (tensor in the files, pattern that it matched)."""

    converter: Any = None
    tensors: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


class GenericCheckpoint(WeightSource):
    """The parameters of one model. Quantized checkpoints are refused before.

    A parameter that the files hold is read part by part. One that transformers makes from several tensors, such as all
    experts' weights, is made whole, one at a time, before its part is taken.
    """

    def __init__(self, path: Path, model: Any) -> None:
        """`model`: on the meta device. Raises: ConfigError for files that cannot be read."""
        self._model = model
        self._files = TensorFiles(path)
        self._sources = _sources(
            model, sorted(self._files.names(), key=load("transformers.core_model_loading").dot_natural_key)
        )
        self._aliases: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._made: dict[str, Tensor] = {}
        conv1d = load("transformers.pytorch_utils").Conv1D
        self._transposed = {f"{name}.weight" for name, module in model.named_modules() if type(module) is conv1d}
        """Weights of linear layers that are stored [in, out], and are read as [out, in]."""

    def __contains__(self, name: str) -> bool:
        return self._own(name) is not None

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        if name in self._transposed:
            shape, part = shape[::-1], None if part is None else replace(part, dim=1 - part.dim)
        tensor = self._stored(name, shape, dtype, part)
        if name in self._transposed:
            tensor = tensor.t()
        # A copy in any case, because it may be a view of the mapped file.
        return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None) -> Tensor:
        sources = self._find(name)
        if sources.converter is None:
            stored = sources.tensors[0][0]
            read = read_floating if dtype.is_floating_point else TensorFiles.read
            return read(self._files, stored, shape, part)
        tensor = self._make(name, shape)
        return tensor if part is None else tensor.narrow(part.dim, part.lo, part.hi - part.lo)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part) -> Tensor | None:
        sources = self._find(name)
        if sources.converter is not None:
            return None
        stored = self._files.view(sources.tensors[0][0], shape, part)
        return stored if stored.dtype == dtype and stored.is_contiguous() else None

    def tied(self, embedding: str, lm_head: str) -> str | None:
        sources = [self._sources[name] for name in (embedding, lm_head) if name in self._sources]
        if len(sources) < 2 or any(each.converter is not None for each in sources):
            return embedding
        return self._files.tied(*(each.tensors[0][0] for each in sources)) and embedding

    def _own(self, name: str) -> str | None:
        """`name`, or the parameter that it is tied to, or one that is tied to it."""
        others = [self._aliases.get(name), *(alias for alias, target in self._aliases.items() if target == name)]
        return next((each for each in (name, *others) if each is not None and each in self._sources), None)

    def _find(self, name: str) -> _Sources:
        own = self._own(name)
        if own is None:
            raise ConfigError(f"no weight file holds what {type(self._model).__name__} needs as {name}")
        return self._sources[own]

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A converted parameter; the others that come with it are kept until they are asked for."""
        if name not in self._made:
            sources = self._find(name)
            converter = deepcopy(sources.converter)
            first = next(target for target, each in self._sources.items() if each is sources)
            for source, pattern in sources.tensors:
                converter.add_tensor(first, source, pattern, read_floating(self._files, source, None))
            try:
                made = converter.convert(first, model=self._model, config=self._model.config)
            except (RuntimeError, ValueError, KeyError) as error:
                raise ConfigError(f"{name} cannot be made from its tensors: {error}") from error
            self._made.update({key: each[0] if isinstance(each, list) else each for key, each in made.items()})
        tensor = self._made.pop(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} has shape {list(tensor.shape)}, config.json implies {list(shape)}")
        return tensor


def _sources(model: Any, names: list[str]) -> dict[str, _Sources]:
    """For each parameter what it is made from; what the model does not use is left out."""
    loading = load("transformers.core_model_loading")
    mapping = load("transformers.conversion_mapping").get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = model.state_dict()
    found: dict[str, _Sources] = {}
    for name in names:
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            continue
        if pattern is None:
            found[target] = _Sources(None, [(name, name)])
            continue
        converter = by_pattern[pattern]
        sources = found.setdefault(target, _Sources(converter))
        sources.tensors.append((name, pattern))
        for other in converter.target_patterns[1:]:
            found[target.replace(converter.target_patterns[0], other)] = sources
    return found
