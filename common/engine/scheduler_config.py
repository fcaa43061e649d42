"""What bounds the steps of an engine, and its sequences."""

from __future__ import annotations

from dataclasses import dataclass

from common.base.errors import BadRequest


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of one sequence."""

    max_model_len: int
    max_num_seqs: int
    """Sequences that hold blocks at the same time."""
    max_num_batched_tokens: int
    """Rows of one step."""
    prefill_chunk: int
    """Prompt rows of a step in which others decode; limits what a prompt adds to their inter-token latency."""
    num_microbatches: int = 1
    """Micro-batches of the running sequences, each with steps of its own: as many as a pipeline has stages."""
    depth: int = 1
    """Steps in flight in each micro-batch: 1, or 2 if the next one is prepared while one runs."""

    def __post_init__(self) -> None:
        assert self.depth in (1, 2), self

    def check_length(self, num_tokens: int) -> None:
        """Raises: BadRequest if a sequence of `num_tokens` tokens leaves no room for an answer."""
        if num_tokens >= self.max_model_len:
            raise BadRequest(
                f"This model's maximum context length is {self.max_model_len} tokens, "
                f"the request has {num_tokens} before anything is generated."
            )
