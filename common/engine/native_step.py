"""A decode step from token ids to logits as one call into the native kernels. Runs on a rank's engine thread.

The weights of a step displace everything else from the processor's caches, so that between the kernels each of PyTorch's
operations takes 20 to 100 times as long as in a loop of its own. A small model's step is one call, on plain arrays.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.base import AttentionBackend
from common.attention.grouped import GroupedAttention
from common.attention.native import NativeAttention
from common.engine.device_inputs import entries_of
from common.engine.sampling.base import Sampler
from common.engine.sampling.host_sampler import HostSampler, HostSamplerOutput
from common.engine.step import StepInput
from common.kernels.native.library import ModelStruct
from common.model.decoder import DecoderModel
from common.model.native_stack import LayerMemory, ModelParts
from common.model.rank_model import RankModel


class NativeStep:
    """Runs the steps for which `takes` is true."""

    def __init__(
        self,
        parts: ModelParts,
        memory: LayerMemory,
        backends: Sequence[tuple[NativeAttention, int]],
        sampler: HostSampler,
    ) -> None:
        """`backends`: all backends, each with the number of its block table. `memory`: theirs, for each layer."""
        self._parts = parts  # keeps the memory that the struct points to
        self._memory = memory
        self._native = parts.stack.native
        self._backends = backends
        self._sampler = sampler
        self._vocab_size = parts.embedding.size(0)
        self._logits: NDArray[np.float32] = np.empty((0, self._vocab_size), np.float32)
        self._logits_address = 0
        self._struct = ModelStruct(
            ctypes.addressof(parts.stack.addresses),
            ctypes.addressof(memory.caches),
            ctypes.addressof(memory.batches),
            parts.embedding.data_ptr(),
            parts.norm.weight.data_ptr(),
            ctypes.addressof(parts.lm_head.struct),
        )
        self._struct.num_layers = len(parts.stack.addresses)
        self._struct.final_eps = parts.norm.eps
        self._address = ctypes.addressof(self._struct)

    def takes(self, step: StepInput) -> bool:
        """Whether all sequences decode, from known tokens and drafts, and none has an adapter or is to be relayed."""
        is_decode = len(step.token_ids) == len(step.samples) and step.num_decode_seqs == len(step.query_lens)
        return is_decode and not (step.relay or step.adapters or step.placeholders or step.scored)

    def run(self, step: StepInput) -> HostSamplerOutput:
        """Compute the step, whose tokens are in the vocabulary, and draw its tokens.

        Raises: ValueError for a block or slot that does not exist, or for lists of different lengths.
        """
        return self._sampler.sample_rows(self._logits_of(step), step.samples)

    def _logits_of(self, step: StepInput) -> NDArray[np.float32]:
        """[T, vocab], valid until the next step."""
        rows = len(step.token_ids)
        _, context_lens, tables = entries_of(step)
        if not rows == len(step.positions) == len(context_lens):
            raise ValueError(f"{rows} token ids do not fit the positions and contexts")
        for backend, table in self._backends:
            backend.plan_rows(context_lens, tables[table], array("q", step.slot_mapping[table]))
        if rows > len(self._logits):
            self._logits = torch.empty(rows, self._vocab_size).numpy()  # cache-line aligned; NumPy's memory is not
            self._logits_address = self._logits.ctypes.data
        token_ids, positions = array("q", step.token_ids), array("q", step.positions)
        rotation = self._struct.rotation
        rotation.cos, rotation.sin = self._parts.rotary.tables_up_to(max(step.positions))
        rotation.positions = positions.buffer_info()[0]
        native = self._native
        native.model_forward(native.team, self._address, token_ids.buffer_info()[0], self._logits_address)
        return self._logits[:rows]


def native_step(model: RankModel, attention: AttentionBackend, sampler: Sampler) -> NativeStep | None:
    """None unless the native kernels have every part of the model, and all of it is on this rank."""
    parts = model.native_parts() if isinstance(model, DecoderModel) else None
    memory = None if parts is None else parts.stack.memory(attention)
    if parts is None or memory is None or not isinstance(sampler, HostSampler):
        return None
    by_table = attention.by_table if isinstance(attention, GroupedAttention) else [(attention, 0)]
    backends = [(backend, table) for backend, table in by_table if isinstance(backend, NativeAttention)]
    return NativeStep(parts, memory, backends, sampler)
