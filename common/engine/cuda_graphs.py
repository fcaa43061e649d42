"""Decode steps of a few fixed sizes, captured once and replayed: no Python and no kernel launches by the host.

A captured step reads and writes the same memory at every replay. `DecodeGraphs` owns that memory; a batch is copied into
it, padded to the next captured size. Padding rows belong to no request: each is the first token of a dummy sequence in
`pad_block`, which no pool hands out, so no result depends on them.

A `StepCapture` captures steps: as CUDA graphs, or as the function itself (`--enforce-eager`, tests on a CPU). Both
compute the same shapes, so their results are equal bit for bit. Runs on the engine thread of a rank; steps are captured
before the rank serves.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.engine.device_inputs import StepRows, attention_metadata, staged
from common.engine.step import StepInput
from common.model.rank_model import RankModel

log = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes (rows) to capture: 1, 2, 4, 8, 16, 24, ... and `max_num_seqs` itself."""
    sizes = {*_SMALL_SIZES, *range(_SIZE_STEP, max_num_seqs, _SIZE_STEP)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class CannotCapture(RuntimeError):
    """The model's steps read values of tensors on the CPU, which a CUDA graph cannot."""


class StepCapture:
    """Captures one function for replay. This class replays it by calling it."""

    keeps_memory = False
    """Whether captured functions hold permanent memory, in addition to that of `DecodeGraphs` and attention."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that replays `run` on the memory that it used; `run` may be called several times for that.

        Raises: CannotCapture, before anything is captured.
        """
        return run


class CudaGraphCapture(StepCapture):
    """CUDA graphs that share one pool for all memory but the static one; only one may run at a time.

    The largest should come first; the others then fit into its memory.
    """

    keeps_memory = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._is_tried = False

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # Warm up: operations create handles and workspaces at their first call, which must not be during capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                run()
                if not self._is_tried:
                    _run_without_waiting(run)
                    self._is_tried = True
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the threads of transfers and of NCCL may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


_WAITS = "called a synchronizing CUDA operation"
"""PyTorch's error, in its synchronization debug mode, for an operation that waits for the GPU."""


def _run_without_waiting(run: Callable[[], None]) -> None:
    """Run a step in a mode in which PyTorch refuses operations that wait for the GPU, in the whole process: no other thread may
    use the GPU meanwhile. A capture that fails leaves PyTorch's allocator unusable, so this is found out before.

    Raises: CannotCapture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this mode is a prototype
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            if _WAITS not in str(error):
                raise
            raise CannotCapture("the model waits for the GPU while it computes") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True)
class _CapturedStep:
    """One size: its views of the static memory, and its replay."""

    size: int
    rows: StepRows
    tensors: dict[str, Tensor]
    """[size, ...] each: on a later stage what the previous one handed over; on all stages the result."""
    attention: AttentionBackend
    replay: Callable[[], None]


class DecodeGraphs:
    """One rank's captured decode steps. `capture` once; then `load` and `run` for each step for which `takes` is true."""

    def __init__(
        self,
        model: RankModel,
        attention: AttentionBackend,
        *,
        max_num_seqs: int,
        pad_block: int,
        block_size: int,
        num_tables: int = 1,
    ) -> None:
        """`pad_block`: a block of the KV memory that belongs to no pool. `num_tables`: of the KV spec."""
        self._model = model
        self._attention = attention
        self._pad_block = pad_block
        self._pad_slot = pad_block * block_size
        self.sizes = graph_sizes(max_num_seqs)
        largest, device = self.sizes[-1], model.device
        self._num_tables = num_tables
        self._inputs = torch.zeros((2 + num_tables) * largest, dtype=torch.int64, device=device)
        self._tensors = {
            each.name: torch.zeros(largest, *each.shape, dtype=each.dtype, device=device)
            for each in model.stage_schema(largest)
        }
        self._captured: dict[int, _CapturedStep] = {}

    @torch.inference_mode()
    def capture(self, capture: StepCapture) -> None:
        """Capture all sizes, the largest first. All ranks of a node do this at the same time. Raises: CannotCapture."""
        started = time.monotonic()
        for size in reversed(self.sizes):
            self._captured[size] = self._capture_size(size, capture)
        log.info("captured decode steps of %s rows in %.1f s", self.sizes, time.monotonic() - started)

    def _capture_size(self, size: int, capture: StepCapture) -> _CapturedStep:
        rows = StepRows.split(self._inputs[: (2 + self._num_tables) * size], size)
        tensors = {name: tensor[:size] for name, tensor in self._tensors.items()}
        attention = self._attention.for_graph(size)
        model = self._model

        def run() -> None:
            received = None if model.mesh.place.is_first_stage else tensors
            for name, tensor in model.forward(rows.token_ids, rows.positions, attention, None, received).items():
                tensors[name].copy_(tensor)

        self._plan(
            _CapturedStep(size, rows, tensors, attention, run),
            StepInput(0, [], [], [[]] * self._num_tables, [], [], [[]] * self._num_tables),
        )
        return _CapturedStep(size, rows, tensors, attention, capture.capture(run))

    def takes(self, step: StepInput) -> bool:
        """Whether all sequences of `step` decode, in not too many rows, and none has an adapter or is to be relayed."""
        few = len(step.token_ids) <= self.sizes[-1]
        return few and step.num_decode_seqs == len(step.query_lens) and not (step.relay or step.adapters)

    def size_for(self, num_rows: int) -> int:
        """The size that `num_rows` rows are padded to."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    @torch.inference_mode()
    def load(self, step: StepInput) -> StepRows:
        """Copy `step` into the static memory and plan its attention.

        Returns the step's own rows, which may be changed until `run`.
        """
        num_rows = len(step.token_ids)
        captured = self._captured[self.size_for(num_rows)]
        self._plan(captured, step)
        return captured.rows.first(num_rows)

    def _plan(self, captured: _CapturedStep, step: StepInput) -> None:
        """Raises: ValueError for lists of different lengths: past the end of the shorter ones an old step's values
        would be used."""
        size, num_rows = captured.size, len(step.token_ids)
        slots = step.slot_mapping
        if not num_rows == len(step.positions) == sum(step.query_lens) or any(len(own) != num_rows for own in slots):
            raise ValueError(f"{num_rows} token ids do not fit the positions, slots and query lengths")
        pad = size - num_rows
        nothing, spare = [0] * pad, [self._pad_slot] * pad
        values = [*step.token_ids, *nothing, *step.positions, *nothing]
        for own in slots:
            values += own + spare
        self._inputs[: len(values)].copy_(staged(values, self._inputs.device), non_blocking=True)
        captured.attention.plan(attention_metadata(step, captured.rows.slots, pad, self._pad_block))

    @torch.inference_mode()
    def run(self, num_rows: int, received: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Compute the step that was loaded. `received`: what the previous stage handed over, None on the first.

        Returns [num_rows, ...] each, views of static memory that hold until the next `run`.
        """
        captured = self._captured[self.size_for(num_rows)]
        for name, tensor in (received or {}).items():
            captured.tensors[name][:num_rows].copy_(tensor)
            captured.tensors[name][num_rows:].zero_()
        captured.replay()
        return {name: tensor[:num_rows] for name, tensor in captured.tensors.items()}
