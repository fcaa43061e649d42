"""A decoder-only model whose layers a class of transformers computes. Each rank builds its own part.

The class is built without weights, its linear layers are replaced by ours (`common.model.generic.load`), and its attention
modules call the step's backend (`common.model.generic.attention`). One step is one call of the class, with all rows as one
sequence. Runs on a rank's engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.attention.base import AttentionBackend, AttentionShape
from common.model.attention import multi_head_shape
from common.model.build import Build
from common.model.description import multi_head
from common.model.generic import attention
from common.model.generic.attention import CurrentStep, LayerAttention
from common.model.generic.config import SPLIT, GenericConfig, TensorParallelPlan
from common.model.generic.describe import read_class
from common.model.generic.library import load
from common.model.generic.load import ModuleLoader, replace_norms
from common.model.generic.modules import FirstLayer, LastLayer, NotHere, SkippedLayer, StageDone
from common.model.generic.names import PartNames, find_parts
from common.model.generic.probe import build_on_meta, cannot_be_built
from common.model.generic.recorded_step import RecordedSteps
from common.model.generic.rope import freeze_rotary
from common.model.rank_model import HIDDEN, OnProgress, RankModel
from common.model.sharding import HeadRange


class GenericModel(RankModel):
    """One rank's part of a model: `RankModel`."""

    def __init__(self, build: Build, causal: Any, on_progress: OnProgress = lambda done, total: None) -> None:
        """`causal`: the class's model, with attention implementation `attention.NAME`, on the meta device."""
        config, place = build.config, build.mesh.place
        assert isinstance(config, GenericConfig)
        super().__init__(build)
        self.config: GenericConfig = config
        self.kv_scales = ((1.0, 1.0),) * len(build.layer_numbers)
        self._heads = build.heads(config.attention)
        self._layer_numbers = build.layer_numbers
        self._step = CurrentStep()
        self._causal = causal
        names = find_parts(causal, config.attention_modules)
        _make_buffers(causal, build.device)
        freeze_rotary(causal, config.context, build.device)
        _silence(causal)
        plan = TensorParallelPlan(config.tp_plan)
        self._attach(build, plan)
        _load(build, causal, names, plan, on_progress)
        self._sinks = _sinks(build, config, causal, self._heads)
        self._first = _cut_stage(causal, names, build)
        self._trunk: Any = causal.get_submodule(names.trunk)
        self._final = _FinalHidden()
        if place.is_last_stage:
            causal.set_submodule(names.trunk, self._final)
        # Ranks that wait for each other would have to agree on what can be recorded. Recording reads values, for which a GPU
        # must be waited for; there CUDA graphs save Python's time.
        records = place.world_size == 1 and build.device.type == "cpu"
        self._recorded = RecordedSteps(self._from_tokens) if records else None
        self._recorded_head = RecordedSteps(self._head)

    def _attach(self, build: Build, plan: TensorParallelPlan) -> None:
        """Give this rank's attention modules the backend."""
        config = self.config
        for index, number in enumerate(build.layer_numbers):
            described = multi_head(config.layers[number])
            module = self._causal.get_submodule(config.attention_modules[number])
            is_split = any(
                plan.style(f"{config.attention_modules[number]}.{inner}") in SPLIT
                for inner, _ in module.named_modules()
            )
            factor = described.scale / config.attention.scale
            own = LayerAttention(
                self._step, index, self._heads, factor, described.head_dim, None if is_split else build.mesh
            )
            setattr(module, attention.STATE, own)

    def attention_shapes(self, block_size: int, max_context: int = 0) -> list[AttentionShape]:
        attention = self.config.attention
        heads = self._heads.num_q, self._heads.num_kv, attention.head_dim
        shape = multi_head_shape(attention, heads, self.precision.wide, block_size, max_context)
        return [
            replace(shape, window=self.config.layers[number].attention.window, sinks=sinks)
            for number, sinks in zip(self._layer_numbers, self._sinks, strict=True)
        ]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
        received: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        self._step.backend, self._step.on_layer = attention, on_layer
        if received is not None:
            assert self._first is not None
            self._first.received = received[HIDDEN][None]
            return {HIDDEN: self._run(positions, inputs_embeds=self._first.received)}
        if self._recorded is not None and on_layer is None:
            return {HIDDEN: self._recorded(token_ids, positions)}
        return {HIDDEN: self._from_tokens(token_ids, positions)}

    def _from_tokens(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self._run(positions, input_ids=token_ids[None])

    def _run(self, positions: Tensor, **inputs: Tensor) -> Tensor:
        try:
            return self._trunk(position_ids=positions[None], use_cache=False, **inputs).last_hidden_state[0]
        except StageDone as done:
            return done.hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """By what the class does after its base model."""
        hidden = hidden.to(self.precision.wide)
        try:
            return self._head(hidden) if self._recorded is None else self._recorded_head(hidden)
        except NotHere:
            return None

    def _head(self, hidden: Tensor) -> Tensor:
        self._final.hidden = hidden[None]
        # Only the final hidden states matter, which `_final` gives whatever the inputs are.
        return self._causal(inputs_embeds=self._final.hidden, use_cache=False).logits[0].float()


class _FinalHidden(nn.Module):
    """Takes the place of the class's base model: returns what the real one computed."""

    hidden: Tensor

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return _Output(self.hidden)

    @property
    def decoder(self) -> _FinalHidden:
        return self


class _Output:
    """The output of a base model that keeps nothing but hidden states."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _silence(causal: Any) -> None:
    """Switch off a warning for which some classes read the tokens in every step."""
    for module in causal.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_, **__: None


def _make_buffers(causal: Any, device: torch.device) -> None:
    """Compute the buffers that no file holds, such as the frequencies of rotary embeddings."""
    for module in causal.modules():
        for name in module._non_persistent_buffers_set:
            buffer = getattr(module, name)
            if buffer is not None:
                setattr(module, name, torch.empty_like(buffer, device=device))
        module._is_hf_initialized = False
    try:
        causal.initialize_weights()
    except Exception as error:  # a class may raise anything
        raise cannot_be_built(type(causal), error) from error


def _load(build: Build, causal: Any, names: PartNames, plan: TensorParallelPlan, on_progress: OnProgress) -> None:
    """Read this rank's share of the weights."""
    place = build.mesh.place
    both = f"{names.embedding}.weight", f"{names.lm_head}.weight"
    tied = build.config.tie_word_embeddings and build.weights.tied(*both) is not None
    loader = ModuleLoader(build, causal, plan)
    parts = len(build.layer_numbers) + 2
    embedding, lm_head = causal.get_input_embeddings(), causal.get_output_embeddings()
    needed = place.is_first_stage or (place.is_last_stage and tied)
    rows = build.vocabulary(f"{names.embedding}.weight") if needed else None
    for name in names.others:
        loader.fill(name)
    on_progress(1, parts)
    for done, number in enumerate(build.layer_numbers):
        loader.fill(names.layers[number])
        on_progress(done + 2, parts)
    replace_norms(causal.get_submodule(names.trunk), build.kernels, build.precision.wide)
    if place.is_last_stage:
        loader.lm_head(names.lm_head, lm_head, rows if tied else None)
    if place.is_first_stage:
        assert rows is not None
        loader.embedding(names.embedding, embedding, rows)
    on_progress(parts, parts)


def _sinks(build: Build, config: GenericConfig, causal: nn.Module, heads: HeadRange) -> list[tuple[Tensor, ...]]:
    """`AttentionShape.sinks` of each layer. A layer without sinks beside others that have them gets sinks of no weight."""
    found: list[Tensor] = []
    for number in build.layer_numbers:
        name = config.sinks[number]
        if name is None:
            found.append(torch.full((heads.num_q,), -math.inf, device=build.device))
            continue
        given = getattr(causal.get_submodule(config.attention_modules[number]), name).detach().float()
        found.append((given if len(given) == heads.num_q else given[heads.q_lo : heads.q_hi]).contiguous())
    return [(sinks,) if any(config.sinks) else () for sinks in found]


def _cut_stage(causal: nn.Module, names: PartNames, build: Build) -> FirstLayer | None:
    """Leave only this stage's layers. Returns the first one, if it gets its input from another stage."""
    own, place = build.layer_numbers, build.mesh.place
    for number, name in enumerate(names.layers):
        if number not in own:
            causal.set_submodule(name, SkippedLayer())
    if not place.is_last_stage:
        last = names.layers[own[-1]]
        causal.set_submodule(last, LastLayer(causal.get_submodule(last)))
    if place.is_first_stage:
        return None
    first = FirstLayer(causal.get_submodule(names.layers[own[0]]))
    causal.set_submodule(names.layers[own[0]], first)
    return first


def build_class(path: Path, dtype: torch.dtype) -> Any:
    """The class's model in directory `path` without weights, whose attention is ours. Raises: ConfigError."""
    load("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.attend)
    return build_on_meta(*read_class(path), attention.NAME, dtype)
