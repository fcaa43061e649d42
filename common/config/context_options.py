"""Options of nodes for context parallelism. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.fields import option


@dataclass(frozen=True, kw_only=True)
class PrefillContextOptions:
    """The context-parallel ranks of a prefill node."""

    prefill_context_parallel: int = option(
        1,
        "Groups of --tensor-parallel-size ranks that share the KV of every prompt: each holds every N-th block of it and all of "
        "the weights.",
        "Ranks",
        "--prefill-context-parallel-size",
        "--pcp",
        low=1,
        high=64,
        own=True,
    )


@dataclass(frozen=True, kw_only=True)
class DecodeContextOptions:
    """The context-parallel ranks of a decode node."""

    decode_context_parallel: int = option(
        1,
        "Groups of --tensor-parallel-size ranks in each stage that share the KV of every sequence: each holds every N-th block "
        "of it and all of the stage's weights, so that contexts may be N times as long.",
        "Ranks",
        "--decode-context-parallel-size",
        "--dcp",
        low=1,
        high=64,
        own=True,
    )
