"""A decoder-only model: embedding, layers, final norm, LM head. Each rank builds its own part.

Every family is this model: they differ in the descriptions of their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.kernels.native.kernels import NativeKernels, NativeRotary
from common.kernels.native.linear import NativeLinear
from common.model.attention import Attention
from common.model.build import Build
from common.model.decoder_layer import DecoderLayer, ForwardContext
from common.model.draft_head import EagleHead, MtpHead
from common.model.layers import Embedding, LearnedPositions, LMHead
from common.model.mixture.exchange import Dispatched
from common.model.mlp import MixtureMlp
from common.model.native_layer import NativeLayer, as_native
from common.model.native_stack import ModelParts, NativeStack, as_stack
from common.model.norms import Norm, RMSNorm, make_norm
from common.model.rank_model import AUX_HIDDEN, HIDDEN, OnProgress, RankModel
from common.model.rotary import make_rotary


class DecoderModel(RankModel):
    """One rank's part of a model: a pipeline stage's layers, with its share of their heads and inner features.

    Only the first stage holds the embedding, only the last the final norm and the LM head; where the LM head is tied to
    the embedding, both stages read it. Weights never change after construction.
    """

    def __init__(self, build: Build, on_progress: OnProgress = lambda done, total: None) -> None:
        config, place, names = build.config, build.mesh.place, build.names
        parts = len(build.layer_numbers) + 2
        super().__init__(build)
        embedding, lm_head = f"{names.embedding}.weight", f"{names.lm_head}.weight"
        tied = build.weights.tied(embedding, lm_head) if config.tie_word_embeddings and build.lm_head else None
        own = build.for_own_rows
        # With data-parallel attention a rank looks up all ids, and has a part of the LM head.
        is_shared = tied is not None and not place.is_data_parallel
        needed = place.is_first_stage or (place.is_last_stage and is_shared)
        vocabulary = own.vocabulary(tied or embedding) if needed else None
        self._embedding = Embedding(own, vocabulary) if place.is_first_stage and vocabulary is not None else None
        learned = config.ends.positions
        self._positions = LearnedPositions(build, learned) if place.is_first_stage and learned is not None else None
        on_progress(1, parts)
        native = build.kernels.native if isinstance(build.kernels, NativeKernels) else None
        unadapted, build = build, replace(build, adapt=self.adapters.adapt)
        descriptions = [config.layers[number] for number in build.layer_numbers]
        ropes = [(layer.rope, layer.attention.rotary_dim) for layer in descriptions]
        distinct = list(dict.fromkeys(ropes))
        self._rotaries = [make_rotary(*rope, config.max_context, build.kernels, build.device) for rope in distinct]
        layers: list[DecoderLayer | NativeLayer] = []
        kv_scales: list[tuple[float, ...]] = []
        self._attentions: list[Attention] = []
        self._dispatched: list[Dispatched] = []
        for i, number in enumerate(build.layer_numbers):
            layer = DecoderLayer(build, number, i, distinct.index(ropes[i]))
            whole = native and as_native(layer, native, own.mesh, build.precision.wide, self.adapters)
            layers.append(whole or layer)
            kv_scales.append(layer.kv_scales)
            if isinstance(layer.mlp, MixtureMlp):
                experts = layer.mlp.experts
                if isinstance(experts, Dispatched):
                    self._dispatched.append(experts)
                if experts.slots is not None:
                    self.expert_layers[number] = experts.slots
            self._attentions.append(layer.attention)
            on_progress(i + 2, parts)
        self.kv_scales = tuple(kv_scales)
        self._norm: Norm | None = None
        self._lm_head: LMHead | None = None
        if place.is_last_stage:
            self._norm = make_norm(build, names.final_norm, config.final_norm)
            if build.lm_head:
                self._lm_head = LMHead(build, tied or lm_head, vocabulary if is_shared else None)
        head = config.draft_head
        self._aux_layers = () if head is None else head.aux_layers
        is_one_stack = not self._aux_layers and len(distinct) == 1
        self._layers = as_stack(layers, self.adapters, own.mesh) if is_one_stack else layers
        if head is not None:
            assert self._embedding is not None
            assert self._lm_head is not None
            assert vocabulary is not None
            if head.path is None:
                self.draft_head = MtpHead(unadapted, head, self._embedding, self._lm_head)
            else:
                self.draft_head = EagleHead(unadapted, head, vocabulary)
            self.kv_scales += self.draft_head.kv_scales
        on_progress(parts, parts)

    def attention_shapes(self, block_size: int, max_context: int = 0) -> list[AttentionShape]:
        shapes = [attention.shape(block_size, max_context) for attention in self._attentions]
        if self.draft_head is not None:
            shapes.append(self.draft_head.attention_shape(block_size, max_context))
        return shapes

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
        received: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        if not token_ids.size(0):
            for experts in self._dispatched:
                experts.serve()
            return {HIDDEN: torch.empty(0, self.config.hidden_size, dtype=self.precision.wide, device=self.device)}
        dtype = self.precision.for_rows(token_ids.size(0))
        if self._embedding is not None:
            hidden = self._embedding.forward(token_ids, dtype)
        else:
            assert received is not None
            hidden = received[HIDDEN]
        if self._positions is not None:
            self._positions.add_(hidden, positions)
        delta: Tensor | None = None
        rotations = [rotary.step(positions, dtype) for rotary in self._rotaries]
        context = ForwardContext(rotations, attention, on_layer)
        aux: list[Tensor] = []
        for number, layer in enumerate(self._layers):
            if number in self._aux_layers:
                aux.append(hidden.clone() if delta is None else hidden + delta)
            delta = layer.forward(hidden, delta, context)
        assert delta is not None
        computed = {HIDDEN: hidden.add_(delta) if self._norm is None else self._norm.forward(hidden, delta)}
        return {**computed, AUX_HIDDEN: torch.cat(aux, 1)} if aux else computed

    def native_parts(self) -> ModelParts | None:
        """The parts for a step in one call, if all of them are on this rank and the native kernels have them."""
        dtype = self.precision.wide
        embedding = None if self._embedding is None else self._embedding.plain_weight(dtype)
        lm_head = None if self._lm_head is None else self._lm_head.plain_linear()
        stack, rotary, norm = self._layers[0], self._rotaries[0], self._norm
        if (
            self._positions is not None
            or self.precision.narrow != dtype
            or embedding is None
            or not isinstance(rotary, NativeRotary)
            or not isinstance(stack, NativeStack)
            or not isinstance(norm, RMSNorm)
            or not isinstance(lm_head, NativeLinear)
            or lm_head.packed.shape[0] != embedding.size(0)
        ):
            return None
        return ModelParts(embedding, rotary, stack, norm, lm_head)

    def logits(self, hidden: Tensor) -> Tensor | None:
        assert self._lm_head is not None
        return self._lm_head.forward(hidden.to(self.precision.for_rows(hidden.size(0))))
