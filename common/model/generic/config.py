"""The config of a model that a class of transformers computes, with its tensor-parallel plan: which part of a module a rank
holds. No torch and no transformers.

`common.model.generic.describe` makes it on nodes. Routers read only `common.model.facts`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.base.errors import ConfigError
from common.model.config import ModelConfig
from common.model.description import MultiHeadDescription, multi_head

COLUMNS = frozenset({"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"})
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
"""Styles after which every rank has the output features of all ranks."""
SPLIT = frozenset({"rowwise_split_input", "rowwise_rep"})
"""Styles in which a rank is given all input features and uses its own."""
EXPERTS = "moe_tp_experts"
"""Style of a module whose parameters are split: its outputs are summed over the ranks."""
WHOLE = frozenset({"replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "local_params"})
"""Styles that concern training alone, or parameters that have styles of their own."""
VOCABULARY = frozenset({"embedding_rowwise"})
STYLES = COLUMNS | ROWS | WHOLE | VOCABULARY | {EXPERTS}


class TensorParallelPlan:
    """Styles by name."""

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        self._patterns = [
            (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style)
            for pattern, style in entries
            if style not in WHOLE
        ]

    def style(self, name: str) -> str | None:
        """How the module or parameter `name` is split; None: every rank holds all of it."""
        return next((style for pattern, style in self._patterns if pattern.fullmatch(name)), None)


@dataclass(frozen=True, kw_only=True)
class GenericConfig(ModelConfig):
    """What nodes must know of the class's layers. Their MLP descriptions stand for the number of weights only."""

    config_digest: str
    """Digest of config.json: the class may read any of its keys."""
    v_head_dim: int
    """Width of the values that layers produce; in the cache they are padded to the width of keys."""
    attention_modules: tuple[str, ...]
    """Name of the module that attends, for each layer."""
    sinks: tuple[str | None, ...]
    """For each layer, the parameter of that module which holds a sink for each head; None: the layer has none."""
    tp_plan: tuple[tuple[str, str], ...]
    """(pattern of module or parameter names, style) of tensor parallelism; empty: the class has no plan."""
    has_stages: bool
    """Whether its layers hand over nothing but hidden states, so that they can be pipeline stages."""
    context: int
    """Longest context: the served one if rotary embeddings depend on it, else the longest possible."""
    rope_by_length: bool
    """Whether rotary embeddings depend on the longest context."""

    @property
    def attention(self) -> MultiHeadDescription:
        """The attention of every layer, apart from its sliding window and its scale."""
        return multi_head(self.layers[0])

    def for_context(self, max_model_len: int) -> GenericConfig:
        return replace(self, context=max_model_len) if self.rope_by_length else self

    def check_split(self, tp_size: int, pp_size: int) -> None:
        if tp_size > 1 and not self.tp_plan:
            raise ConfigError(
                f"transformers has no tensor-parallel plan for {self.architecture}: use --tensor-parallel-size 1"
                + (" and pipeline stages" if self.has_stages else "")
            )
        if pp_size > 1 and not self.has_stages:
            raise ConfigError(
                f"transformers has no pipeline plan for {self.architecture}: use --pipeline-parallel-size 1"
                + (" and tensor-parallel ranks" if self.tp_plan else "")
            )
