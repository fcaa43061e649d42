"""Measures the memory of the largest steps on a GPU by running them once before the KV cache is allocated.

Runs on the thread that loads the model, on all ranks of a node at the same time.
"""

from __future__ import annotations

import gc
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from common.attention.base import AttentionBackend
from common.control.messages import SamplingParams
from common.engine.runner import ModelRunner
from common.engine.seen_tokens import SeenTokens
from common.engine.step import SampleSpec, StepInput
from common.kv.rank_layout import blocks_for
from common.kv.storage import KVStorage
from common.node.kv_budget import GRAPH_BYTES, GpuMemoryUse

log = logging.getLogger(__name__)

_MOST_MEMORY = SamplingParams(
    seed=0, max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=1.0, logprobs=20
)
"""Sampling parameters that need the most memory: changed logits and every kind of threshold."""
_SEEN = SeenTokens(array("i", [0]).tobytes(), array("i", [1]).tobytes())
_LEAST_MEMORY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
"""One such row makes a sampler copy all other rows."""


class CudaMeter:
    """Memory of one GPU as PyTorch and the driver report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        """Bytes of this process's tensors."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def start(self) -> None:
        """Reset the peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Peak bytes of tensors since `start`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def gpu(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU, after this process has released all memory that it does not use."""
        gc.collect()  # reference cycles would keep the profile's KV memory
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True)
class Largest:
    """The largest sizes of a node's steps."""

    rows: int
    """Rows of one step, including those of prompts and of answers."""
    context: int
    """Tokens of the longest sequence."""
    num_seqs: int
    num_tables: int = 1
    """Block tables of a sequence."""

    @property
    def blocks(self) -> int:
        """KV blocks that the profile's steps need."""
        return blocks_for(max(1, min(self.rows, self.context)))


def largest_steps(largest: Largest) -> list[StepInput]:
    """Make two steps: the longest prompt chunk, and the most sequences in a step with all its rows. Every sequence samples.

    Sequences share their blocks, so the results are meaningless.
    """
    one = min(largest.rows, largest.context)
    num_seqs = min(largest.num_seqs, largest.rows)
    each, more = divmod(min(largest.rows, num_seqs * largest.context), num_seqs)
    return [_step([one], largest), _step([each + (i < more) for i in range(num_seqs)], largest)]


def decode_step(largest: Largest, num_seqs: int) -> StepInput:
    """Make a step with one row for each of `num_seqs` sequences."""
    return _step([1] * num_seqs, largest, num_decode_seqs=num_seqs)


def warm_up(num_tables: int = 1) -> StepInput:
    """Make a step of one row through every layer, so that no client waits for the first access to weights and memory."""
    return replace(decode_step(Largest(1, 1, 1, num_tables), 1), samples=[SampleSpec(0, 0, _LEAST_MEMORY, 1, 0)])


def _step(lens: list[int], largest: Largest, num_decode_seqs: int = 0) -> StepInput:
    rows = [at for length in lens for at in range(length)]
    last_rows = [end - 1 for end in accumulate(lens)]
    samples = [SampleSpec(i, last_rows[i], _MOST_MEMORY, length, 0, _SEEN) for i, length in enumerate(lens)]
    if len(samples) > 1:
        samples[-1] = SampleSpec(len(lens) - 1, last_rows[-1], _LEAST_MEMORY, lens[-1], 0)
    return StepInput(
        step_id=0,
        token_ids=[0] * len(rows),
        positions=rows,
        slot_mapping=[rows] * largest.num_tables,
        query_lens=lens,
        context_lens=lens,
        block_tables=[[list(range(largest.blocks))] * len(lens)] * largest.num_tables,
        num_decode_seqs=num_decode_seqs,
        samples=samples,
    )


def profile_run(
    make_storage: Callable[[int], KVStorage],
    make_runner: Callable[[KVStorage], tuple[ModelRunner, AttentionBackend]],
    largest: Largest,
    meter: CudaMeter,
    graph_sizes: Callable[[AttentionBackend], list[int]],
    *,
    graphs_kept: bool,
) -> GpuMemoryUse:
    """Run the largest steps on a small KV memory that is freed afterwards.

    `make_storage(blocks)` allocates it. `graph_sizes`: batch sizes of the decode steps that are captured later with this
    attention, whose static memory is included; empty for none. `graphs_kept`: include the graphs' own memory too.
    """
    weights = meter.used()
    storage = make_storage(largest.blocks)
    kv_bytes = meter.used() - weights
    meter.start()
    runner, attention = make_runner(storage)
    # The single-row step uses other kernels, which are loaded (or compiled for minutes) at first use.
    for step in (*largest_steps(largest), decode_step(largest, 1)):
        runner.execute(step)
    activations = meter.peak() - weights - kv_bytes
    graphs = _graph_bytes(runner, attention, largest, meter, graph_sizes(attention), graphs_kept)
    del runner, attention, storage
    free, total = meter.gpu()
    return GpuMemoryUse(total, free, weights, activations, graphs)


def _graph_bytes(
    runner: ModelRunner, attention: AttentionBackend, largest: Largest, meter: CudaMeter, sizes: list[int], kept: bool
) -> int:
    """Attention's static memory; all sizes share a part of it. If graphs are kept, add their common memory pool and the
    driver's memory for each graph."""
    if not sizes:
        return 0
    before = meter.used()
    backends = [attention.for_graph(sizes[-1])]
    shared = meter.used() - before
    backends.append(attention.for_graph(sizes[-1]))
    each = meter.used() - before - shared
    del backends
    if not kept:
        return shared + len(sizes) * each
    before = meter.used()
    meter.start()
    runner.execute(decode_step(largest, sizes[-1]))
    pool = meter.peak() - before
    return shared + len(sizes) * (each + GRAPH_BYTES) + pool
