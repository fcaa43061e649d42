"""One rank's part of one step: plain lists in, tokens out. Runs on the engine thread; keeps no state between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata
from common.engine.sampler import sample
from common.engine.step import SampledToken, StepInput, StepOutput
from common.errors import EngineError, RankLost
from common.kv.storage import KVStorage
from common.model.decoder import DecoderModel


class ModelRunner:
    """Runs `StepInput`s on one rank's model, KV memory and attention backend."""

    def __init__(self, model: DecoderModel, storage: KVStorage, attention: AttentionBackend) -> None:
        self._model = model
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
        started = time.perf_counter()
        several = self._mesh.place.world_size > 1
        try:
            if several:
                self._check(step)
            token_ids, positions = self._plan(step)
        except (RuntimeError, IndexError, ValueError) as error:
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        planned_s = time.perf_counter() - started
        received = self._receive(token_ids.size(0))
        started = time.perf_counter()
        try:
            hidden = self._model.forward(token_ids, positions, self._attention, on_layer, received)
            sampled = self._sample(step, hidden) if self._mesh.place.is_last_stage else []
        except (RuntimeError, IndexError, ValueError) as error:
            if several:
                raise RankLost(f"step {step.step_id} failed halfway on {self._mesh.place}: {error}") from error
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        forward_s = planned_s + time.perf_counter() - started
        if not self._mesh.place.is_last_stage:
            self._mesh.send_hidden(hidden)
        return StepOutput(step.step_id, sampled, forward_s)

    def _check(self, step: StepInput) -> None:
        """What an operation of one rank alone might find out halfway, while the others wait for it."""
        rows = len(step.token_ids)
        if not rows == len(step.positions) == len(step.slot_mapping) == sum(step.query_lens):
            raise ValueError(f"{rows} token ids do not fit the positions, slots and query lengths")
        if min(step.token_ids) < 0 or max(step.token_ids) >= self._model.config.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self._model.config.vocab_size}")
        if any(spec.seq_index >= len(step.query_lens) for spec in step.samples):
            raise ValueError("a sample is of a sequence that the step does not have")

    def _plan(self, step: StepInput) -> tuple[Tensor, Tensor]:
        token_ids, positions, slots = (
            torch.tensor(values, dtype=torch.int64, device=self._device)
            for values in (step.token_ids, step.positions, step.slot_mapping)
        )
        self._attention.plan(AttentionMetadata(step.query_lens, step.context_lens, step.block_tables, slots))
        return token_ids, positions

    def _receive(self, rows: int) -> Tensor | None:
        if self._mesh.place.is_first_stage:
            return None
        model = self._model
        return self._mesh.recv_hidden(rows, model.config.hidden_size, model.precision.for_rows(rows))

    def _sample(self, step: StepInput, hidden: Tensor) -> list[SampledToken]:
        if not step.samples:
            return []
        ends = list(accumulate(step.query_lens))
        rows = torch.tensor([ends[spec.seq_index] - 1 for spec in step.samples], device=self._device)
        logits = self._model.logits(hidden.index_select(0, rows))
        return [] if logits is None else sample(logits, step.samples)
