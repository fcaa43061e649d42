"""The styles of transformers' tensor-parallel plans: which part of a module a rank holds. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
