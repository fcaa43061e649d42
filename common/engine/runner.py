"""One rank's part of one step: plain lists in, tokens out. Runs on the engine thread; keeps no state between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata
from common.device import use_device
from common.engine.graphs import DecodeGraphs
from common.engine.inputs import StepRows, rows_of, to_device
from common.engine.sampler import sample
from common.engine.step import SampledToken, StepInput, StepOutput
from common.errors import EngineError, RankLost
from common.kv.storage import KVStorage
from common.model.decoder import DecoderModel


class ModelRunner:
    """Runs `StepInput`s on one rank's model, KV memory and attention backend."""

    def __init__(
        self,
        model: DecoderModel,
        storage: KVStorage,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs`, recorded already, run the steps that they take."""
        self._model = model
        self._graphs = graphs
        self._mesh = model.mesh
        self._attention = attention
        self._device = storage.data.device

    @torch.inference_mode()
    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Run this rank's part of one step. Every rank of the node runs the same steps in the same order.

        Calls `on_layer(i)` on this thread as soon as the KV of this rank's i-th layer is final. Only the last stage's
        `tp_rank` 0 samples; on the others `sampled` is empty. `forward_s` leaves out waiting for the previous stage.

        Raises: EngineError if the step's tensors do not fit together or an operation fails; with several ranks, only
        for what all of them find before they exchange anything. RankLost, after which this rank must end, if
        another one is gone or if this one failed halfway.
        """
        use_device(self._device)
        started = time.perf_counter()
        several = self._mesh.place.world_size > 1
        try:
            if several or self._device.type != "cpu":
                self._check(step)
            recorded = self._graphs if self._graphs is not None and self._graphs.takes(step) else None
            rows = recorded.load(step) if recorded is not None else self._plan(step)
        except (RuntimeError, IndexError, ValueError) as error:
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        planned_s = time.perf_counter() - started
        num_rows = rows.token_ids.size(0)
        received = self._receive(num_rows)
        started = time.perf_counter()
        try:
            if recorded is not None:
                hidden = recorded.run(num_rows, received)
            else:
                hidden = self._model.forward(rows.token_ids, rows.positions, self._attention, on_layer, received)
            sampled = self._sample(step, hidden) if self._mesh.place.is_last_stage else []
        except (RuntimeError, IndexError, ValueError) as error:
            if several:
                raise RankLost(f"step {step.step_id} failed halfway on {self._mesh.place}: {error}") from error
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        forward_s = planned_s + time.perf_counter() - started
        if not self._mesh.place.is_last_stage:
            # What is on its way to the next stage must not change, and recorded steps write to the same memory.
            self._mesh.send_hidden(hidden if recorded is None else hidden.clone())
        return StepOutput(step.step_id, sampled, forward_s)

    def _check(self, step: StepInput) -> None:
        """What an operation of one rank alone might find out halfway, while the others wait for it, and what on a card
        ends the process: an index out of range."""
        rows = len(step.token_ids)
        if not rows == len(step.positions) == len(step.slot_mapping) == sum(step.query_lens):
            raise ValueError(f"{rows} token ids do not fit the positions, slots and query lengths")
        if min(step.token_ids) < 0 or max(step.token_ids) >= self._model.config.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self._model.config.vocab_size}")
        if any(spec.seq_index >= len(step.query_lens) for spec in step.samples):
            raise ValueError("a sample is of a sequence that the step does not have")

    def _plan(self, step: StepInput) -> StepRows:
        rows = rows_of(step, self._device)
        self._attention.plan(AttentionMetadata(step.query_lens, step.context_lens, step.block_tables, rows.slots))
        return rows

    def _receive(self, rows: int) -> Tensor | None:
        if self._mesh.place.is_first_stage:
            return None
        model = self._model
        return self._mesh.recv_hidden(rows, model.config.hidden_size, model.precision.for_rows(rows))

    def _sample(self, step: StepInput, hidden: Tensor) -> list[SampledToken]:
        if not step.samples:
            return []
        ends = list(accumulate(step.query_lens))
        rows = to_device([ends[spec.seq_index] - 1 for spec in step.samples], self._device)
        logits = self._model.logits(hidden.index_select(0, rows))
        return [] if logits is None else sample(logits, step.samples)
