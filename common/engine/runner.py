"""One step: plain lists in, tokens out. Runs on a rank's engine thread; keeps no state between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

import torch

from common.attention.base import AttentionBackend, AttentionMetadata
from common.engine.sampler import sample
from common.engine.step import StepInput, StepOutput
from common.errors import EngineError
from common.kv.storage import KVStorage
from common.model.decoder import DecoderModel


class ModelRunner:
    """Runs `StepInput`s on one rank's model, KV memory and attention backend."""

    def __init__(self, model: DecoderModel, storage: KVStorage, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention
        self._device = storage.data.device

    @torch.inference_mode()
    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Run one step. Calls `on_layer(i)` on this thread as soon as layer i's KV is final.

        Raises: EngineError if the step's tensors do not fit together or an operation fails.
        """
        started = time.perf_counter()
        try:
            sampled = self._run(step, on_layer)
        except (RuntimeError, IndexError, ValueError) as error:
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        return StepOutput(step.step_id, sampled, time.perf_counter() - started)

    def _run(self, step: StepInput, on_layer: Callable[[int], None] | None):
        token_ids, positions, slots = (
            torch.tensor(values, dtype=torch.int64, device=self._device)
            for values in (step.token_ids, step.positions, step.slot_mapping)
        )
        self._attention.plan(AttentionMetadata(step.query_lens, step.context_lens, step.block_tables, slots))
        hidden = self._model.forward(token_ids, positions, self._attention, on_layer)
        if not step.samples:
            return []
        ends = list(accumulate(step.query_lens))
        rows = torch.tensor([ends[spec.seq_index] - 1 for spec in step.samples], device=self._device)
        return sample(self._model.logits(hidden.index_select(0, rows)), step.samples)
