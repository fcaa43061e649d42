"""Decode steps of a few fixed sizes, recorded once and replayed: no Python and no launches between kernels.

A recorded step reads and writes the same memory at every replay. `DecodeGraphs` owns that memory; a batch is
copied into it, padded to the next recorded size. The rows that pad belong to no sequence: each is the first token of
a sequence of its own, whose one block is `pad_block`, which no pool ever hands out. So nothing that a request sees
depends on them.

How a step is recorded is a `Recorder`: CUDA graphs, or nothing but the function itself, which is `--enforce-eager`
and what tests run on a CPU. Both compute the very same shapes, so their results are equal bit for bit.
Runs on the engine thread of a rank; recorded before the rank serves.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata
from common.engine.device_inputs import StepRows, staged
from common.engine.step import StepInput
from common.model.decoder import DecoderModel

log = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, 8, 16, 24, ... and `max_num_seqs` itself."""
    sizes = {*_SMALL_SIZES, *range(_SIZE_STEP, max_num_seqs, _SIZE_STEP)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class Recorder(Protocol):
    """Keeps one function for repetition."""

    @property
    def keeps_memory(self) -> bool:
        """Whether what it records holds memory for good, beside what `DecodeGraphs` and attention own."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run` on the memory that it used; `run` may be called any number of times for that."""
        ...


class EagerRecorder:
    """Repeats a function by calling it."""

    keeps_memory = False

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class CudaRecorder:
    """CUDA graphs that share one memory pool: what one needs beside the static memory, all may use, one at a time.

    The largest should come first; the others then fit into what it took.
    """

    keeps_memory = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Handles and workspaces that an operation makes at its first call must not be made while recording.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the threads of transfers and of NCCL may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@dataclass(frozen=True)
class _Recorded:
    """One size: its views of the static memory, and how to run it."""

    rows: StepRows
    hidden: Tensor
    """[rows, hidden]: on a later stage what came from the one before, and everywhere the result."""
    attention: AttentionBackend
    replay: Callable[[], None]


class DecodeGraphs:
    """One rank's recorded decode steps. `record` once; then for each step that `takes`, `load` and `run`."""

    def __init__(
        self, model: DecoderModel, attention: AttentionBackend, *, max_num_seqs: int, pad_block: int, block_size: int
    ) -> None:
        """`pad_block`: a block of the KV memory that belongs to no pool."""
        self._model = model
        self._attention = attention
        self._pad_block = pad_block
        self._pad_slot = pad_block * block_size
        self.sizes = graph_sizes(max_num_seqs)
        largest, device = self.sizes[-1], model.device
        self._inputs = torch.zeros(3 * largest, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(largest, model.config.hidden_size, dtype=model.precision.wide, device=device)
        self._recorded: dict[int, _Recorded] = {}

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Record all sizes, the largest first. All ranks of a node do this at the same time."""
        started = time.monotonic()
        for size in reversed(self.sizes):
            self._recorded[size] = self._record(size, recorder)
        log.info("recorded decode steps of %s rows in %.1f s", self.sizes, time.monotonic() - started)

    def _record(self, size: int, recorder: Recorder) -> _Recorded:
        rows = StepRows(*self._inputs[: 3 * size].split(size))
        hidden = self._hidden[:size]
        attention = self._attention.for_graph(size)
        model = self._model

        def run() -> None:
            received = None if model.mesh.place.is_first_stage else hidden
            hidden.copy_(model.forward(rows.token_ids, rows.positions, attention, None, received))

        recorded = _Recorded(rows, hidden, attention, run)
        self._plan(recorded, StepInput(0, [], [], [], [], [], []))
        return _Recorded(rows, hidden, attention, recorder.record(run))

    def takes(self, step: StepInput) -> bool:
        """Whether `step` is one row for each of not too many sequences, none of which is to be relayed."""
        num_seqs = len(step.query_lens)
        return num_seqs == len(step.token_ids) and num_seqs <= self.sizes[-1] and not step.relay

    def size_for(self, num_seqs: int) -> int:
        """The size that `num_seqs` sequences are padded to."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    @torch.inference_mode()
    def load(self, step: StepInput) -> StepRows:
        """Copy `step` into the static memory and plan its attention.

        Returns the rows that are the step's own, which may be changed until `run`.
        """
        num_seqs = len(step.query_lens)
        recorded = self._recorded[self.size_for(num_seqs)]
        self._plan(recorded, step)
        rows = recorded.rows
        return StepRows(rows.token_ids[:num_seqs], rows.positions[:num_seqs], rows.slots[:num_seqs])

    def _plan(self, recorded: _Recorded, step: StepInput) -> None:
        """Lengths of lists that do not fit raise ValueError, because what is beyond them would be an old step's."""
        size, num_seqs = recorded.hidden.size(0), len(step.query_lens)
        if not num_seqs == len(step.token_ids) == len(step.positions) == len(step.slot_mapping):
            raise ValueError(f"{num_seqs} sequences do not fit the token ids, positions and slots")
        pad = size - num_seqs
        nothing = [0] * pad
        values = [*step.token_ids, *nothing, *step.positions, *nothing, *step.slot_mapping, *([self._pad_slot] * pad)]
        self._inputs[: 3 * size].copy_(staged(values, self._inputs.device), non_blocking=True)
        ones = [1] * pad
        recorded.attention.plan(
            AttentionMetadata(
                query_lens=[1] * size,
                context_lens=step.context_lens + ones,
                block_tables=step.block_tables + [[self._pad_block]] * pad,
                slot_mapping=recorded.rows.slots,
            )
        )

    @torch.inference_mode()
    def run(self, num_seqs: int, received: Tensor | None) -> Tensor:
        """Compute the step that was loaded. received: [num_seqs, hidden] of the previous stage, None on the first.

        Returns [num_seqs, hidden], a view of static memory that holds until the next `run`.
        """
        recorded = self._recorded[self.size_for(num_seqs)]
        if received is not None:
            recorded.hidden[:num_seqs].copy_(received)
            recorded.hidden[num_seqs:].zero_()
        recorded.replay()
        return recorded.hidden[:num_seqs]
