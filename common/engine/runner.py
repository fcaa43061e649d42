"""One rank's part of one step: plain lists in, tokens out. Runs on the engine thread.

Between steps it keeps only the tokens that the last step drew, for the next step's placeholder tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.base.device import use_device
from common.base.errors import EngineError, RankLost
from common.engine.cuda_graphs import DecodeGraphs
from common.engine.device_inputs import StepRows, attention_metadata, rows_of, to_device
from common.engine.handing_on import hand_on
from common.engine.head_runner import HeadRunner
from common.engine.native_step import NativeStep, native_step
from common.engine.rank_part import OwnPart, lens_between, own_part, row_bounds
from common.engine.sampling.base import Sampler, SamplerOutput
from common.engine.sampling.host_sampler import HostSampler
from common.engine.sampling.prompt_logprobs import ScoredPrompts, score_prompts
from common.engine.step import StepInput, StepOutput
from common.kv.page_supply import PageSupply
from common.kv.storage import KVStorage
from common.model.mixture.rebalancer import Rebalancer
from common.model.rank_model import AUX_HIDDEN, HIDDEN, RankModel


@dataclass
class LaunchedStep:
    """A step that was started on this rank. On a GPU it may still run."""

    step_id: int
    drawn: SamplerOutput | None
    launch_s: float
    scored: ScoredPrompts | None = None

    def wait(self) -> StepOutput:
        """Wait until the step's tokens are on the host. Any thread.

        Raises: RankLost if the GPU failed.
        """
        started = time.perf_counter()
        try:
            sampled = self.drawn.wait() if self.drawn is not None else []
            scored = self.scored.wait() if self.scored is not None else []
        except RuntimeError as error:  # the CUDA context is unusable
            raise RankLost(f"step {self.step_id} failed on the GPU: {error}") from error
        return StepOutput(self.step_id, sampled, self.launch_s + time.perf_counter() - started, scored)


class ModelRunner:
    """Runs `StepInput`s on one rank's model, KV memory and attention backend."""

    def __init__(
        self,
        model: RankModel,
        storage: KVStorage,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
        sampler: Sampler | None = None,
        *,
        overlaps: bool = False,
        pages: PageSupply | None = None,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """`graphs`: captured already, used when `takes(step)`. `overlaps`: a step may be launched before the output of
        the previous one is known, with placeholder tokens from it; the same on all ranks. `pages`: those of `storage`.
        `rebalancer`: moves experts before the steps that say so."""
        self._model = model
        self._graphs = graphs
        self._mesh = model.mesh
        self._attention = attention
        self._storage = storage
        self._device = storage.data.device
        self._sampler = sampler or HostSampler()
        self._head = None if model.draft_head is None else HeadRunner(model.draft_head, storage, attention)
        self._native_step = None if overlaps or self._head else native_step(model, attention, self._sampler)
        self._overlaps = overlaps
        self._pages = pages
        self._rebalancer = rebalancer
        self._block_size = storage.layout.spec.block_size
        self._drawn: tuple[int, Tensor] = (0, torch.empty(0, dtype=torch.int64))
        """The last step that drew tokens, and the tokens: [samples] int64, on the device."""

    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """`launch`, and wait for the output."""
        return self.launch(step, on_layer).wait()

    def launch(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> LaunchedStep:
        """Run this rank's part of one step. Every rank of the node runs the same steps in the same order.

        On a CPU the step has been computed when this returns; on a GPU it is under way, and nothing here waited for it.
        Calls `on_layer(i)` on this thread as soon as the KV of this rank's i-th layer is final. Only the last stage's
        `tp_rank` 0 samples; on the others `sampled` is empty. `forward_s` leaves out waiting for the previous stage.

        Raises: EngineError if the step's tensors do not fit together or an operation fails; with several ranks, only
        if every rank detects the error before the first collective. RankLost, after which this rank must end, if
        another one is gone or if this one failed mid-step.
        """
        if step.handed_on:
            self._between_ranks(lambda: hand_on(self._storage, step.handed_on, self._mesh), step)
        if step.rebalances and self._rebalancer is not None:
            self._between_ranks(self._rebalancer.take_turn, step)
        if self._native_step is not None and on_layer is None and self._native_step.takes(step):
            return self._launch_native(self._native_step, step)
        return self._launch(step, on_layer)

    def _between_ranks(self, exchange: Callable[[], None], step: StepInput) -> None:
        """Run an exchange in which all ranks of a stage take part before a step. Raises: RankLost."""
        use_device(self._device)
        try:
            exchange()
        except RuntimeError as error:  # the other ranks wait for this one
            raise RankLost(f"the exchange before step {step.step_id} failed: {error}") from error

    def _launch_native(self, native: NativeStep, step: StepInput) -> LaunchedStep:
        started = time.perf_counter()
        try:
            self._check_vocabulary(step)
            self._prepare(step)
            drawn = native.run(step)
        except (RuntimeError, IndexError, ValueError) as error:
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        return LaunchedStep(step.step_id, drawn, time.perf_counter() - started)

    @torch.inference_mode()
    def _launch(self, step: StepInput, on_layer: Callable[[int], None] | None) -> LaunchedStep:
        use_device(self._device)
        started = time.perf_counter()
        several = self._mesh.place.world_size > 1
        try:
            if several or self._device.type != "cpu":
                self._check(step)
            self._prepare(step)
            bounds = row_bounds(step, self._mesh.place.cp_size)
            # With data-parallel attention this rank computes its own sequences, else all.
            stripe, is_split = self._storage.shard.stripe, self._mesh.place.is_data_parallel
            part = own_part(step, stripe, self._block_size) if is_split else OwnPart(step, [])
            cp_rank = self._mesh.place.cp_rank
            lo, hi = bounds[cp_rank : cp_rank + 2] if bounds else (0, len(part.step.token_ids))
            self._model.adapters.plan(part.step.adapters, lens_between(part.step.query_lens, lo, hi))
            graphs = self._graphs if self._graphs is not None and self._graphs.takes(step) else None
            rows = graphs.load(step) if graphs is not None else self._plan(part.step, bounds)
            self._fill_placeholders(part.step, rows.token_ids)
        except torch.AcceleratorError as error:
            raise _gpu_lost(step, error) from error
        except (RuntimeError, IndexError, ValueError) as error:
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        planned_s = time.perf_counter() - started
        num_rows = hi - lo
        received = None
        if num_rows and not self._mesh.place.is_first_stage:
            received = self._mesh.recv_stage(num_rows, self._model.stage_schema(num_rows))
        started = time.perf_counter()
        try:
            drawn = scored = None
            if step.by_head:
                assert self._head is not None
                drawn = self._sample(step, self._head.forward(step, rows), rows.token_ids, self._head.logits)
                return LaunchedStep(step.step_id, drawn, time.perf_counter() - started)
            if graphs is not None:
                computed = graphs.run(num_rows, received)
            else:
                token_ids, positions = rows.token_ids[lo:hi], rows.positions[lo:hi]
                computed = self._model.forward(token_ids, positions, self._attention, on_layer, received)
            if self._mesh.place.is_last_stage:
                hidden = computed[HIDDEN]
                if bounds and (step.samples or step.scored):
                    hidden = self._mesh.gather_rows(hidden, bounds)
                if self._head is not None:
                    self._head.extend(step, rows, computed.get(AUX_HIDDEN, hidden), on_layer)
                drawn, scored = self._after_layers(step, part, rows, hidden)
        except torch.AcceleratorError as error:
            raise _gpu_lost(step, error) from error
        except (RuntimeError, IndexError, ValueError) as error:
            if several:
                raise RankLost(f"step {step.step_id} failed halfway on {self._mesh.place}: {error}") from error
            raise EngineError(f"step {step.step_id} failed: {error}") from error
        forward_s = planned_s + time.perf_counter() - started
        if not self._mesh.place.is_last_stage and num_rows:
            if graphs is not None:
                # Tensors on their way to the next stage must not change, and captured steps write to the same memory.
                computed = {name: tensor.clone() for name, tensor in computed.items()}
            self._mesh.send_stage(computed, self._model.stage_schema(num_rows))
        return LaunchedStep(step.step_id, drawn, forward_s, scored)

    def _check(self, step: StepInput) -> None:
        """Reject early what would fail on one rank mid-step and hang the others, or trip a device-side assert."""
        rows = len(step.token_ids)
        if not rows == len(step.positions) == sum(step.query_lens) or any(len(s) != rows for s in step.slot_mapping):
            raise ValueError(f"{rows} token ids do not fit the positions, slots and query lengths")
        self._check_vocabulary(step)
        if any(not 0 <= spec.row < rows for spec in step.samples):
            raise ValueError("a sample refers to a row outside the step")

    def _check_vocabulary(self, step: StepInput) -> None:
        if min(step.token_ids) < 0 or max(step.token_ids) >= self._model.config.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self._model.config.vocab_size}")

    def _prepare(self, step: StepInput) -> None:
        stripe = self._storage.shard.stripe
        if self._pages is not None:
            self._pages.reach(stripe.local(max(map(max, step.slot_mapping)) // self._block_size))
        own = [copy for copy in step.copies if stripe.owns(copy.source)]
        for table in {copy.table for copy in own}:
            copies = [copy for copy in own if copy.table == table]
            sources = to_device([stripe.local(copy.source) for copy in copies], self._device)
            targets = to_device([stripe.local(copy.target) for copy in copies], self._device)
            self._storage.copy_blocks(table, sources, targets)

    def _plan(self, step: StepInput, bounds: tuple[int, ...]) -> StepRows:
        if not step.token_ids:  # a data-parallel rank without sequences serves the experts of others
            none = torch.empty(0, dtype=torch.int64, device=self._device)
            return StepRows(none, none, ())
        rows = rows_of(step, self._device)
        self._attention.plan(attention_metadata(step, rows.slots, row_bounds=bounds))
        return rows

    def _fill_placeholders(self, step: StepInput, token_ids: Tensor) -> None:
        """Put the tokens that the last step drew into their rows."""
        if not step.placeholders:
            return
        drawn_by, drawn = self._drawn
        if drawn_by != step.placeholder_step:
            raise ValueError(f"placeholders refer to step {step.placeholder_step}, but step {drawn_by} sampled last")
        rows = to_device([row for row, _ in step.placeholders], self._device)
        samples = to_device([sample for _, sample in step.placeholders], self._device)
        token_ids.index_copy_(0, rows, drawn.index_select(0, samples))

    def _after_layers(
        self, step: StepInput, part: OwnPart, rows: StepRows, hidden: Tensor
    ) -> tuple[SamplerOutput | None, ScoredPrompts | None]:
        """The tokens drawn, and the log-probabilities of prompts. rows, hidden: of `part`."""
        token_ids = rows.token_ids
        if self._mesh.place.is_data_parallel:
            hidden = self._of_all_ranks(step, part, hidden)
            token_ids = to_device(step.token_ids, self._device)
            self._fill_placeholders(step, token_ids)
        scored = None
        if step.scored and self._mesh.place.computes_logits:
            scored = score_prompts(self._model.logits, hidden, self._model.config.vocab_size, step.scored)
        return self._sample(step, hidden, token_ids, self._model.logits), scored

    def _of_all_ranks(self, step: StepInput, part: OwnPart, hidden: Tensor) -> Tensor:
        """[rows, hidden] on all data-parallel ranks, from each rank's [own rows, hidden]: the rows that are sampled, or all of the step
        if it scores prompts."""
        wanted = list(range(len(step.token_ids))) if step.scored else [spec.row for spec in step.samples]
        dtype = self._model.precision.for_rows(len(wanted))
        rows = torch.zeros(len(wanted), hidden.size(1), dtype=dtype, device=self._device)
        if not wanted:
            return rows
        own = {row: at for at, row in enumerate(part.rows)}
        places = [at for at, row in enumerate(wanted) if row in own]
        sources = to_device([own[wanted[at]] for at in places], self._device)
        rows.index_copy_(0, to_device(places, self._device), hidden.index_select(0, sources).to(dtype))
        return self._mesh.all_reduce(rows)

    def _sample(
        self, step: StepInput, hidden: Tensor, token_ids: Tensor, logits_of: Callable[[Tensor], Tensor | None]
    ) -> SamplerOutput | None:
        if not step.samples:
            if not self._mesh.place.samples:
                return None
            # An output without tokens. To wait for it is to wait until the step has ended and no longer writes to its blocks.
            return self._sampler.sample(torch.empty(0, 1, device=self._device), [], None)
        if len(step.samples) < hidden.size(0):
            hidden = hidden.index_select(0, self._sampled_rows(step))
        logits = logits_of(hidden) if self._mesh.place.computes_logits else None
        drawn = None
        if logits is not None:
            drawn = self._sampler.sample(logits, step.samples, self._unseen(step, token_ids))
        if self._overlaps and not step.by_head:
            self._drawn = step.step_id, self._shared(drawn, len(step.samples))
        return drawn

    def _sampled_rows(self, step: StepInput) -> Tensor:
        return to_device([spec.row for spec in step.samples], self._device)

    def _unseen(self, step: StepInput, token_ids: Tensor) -> Tensor | None:
        """[samples] the last drawn token, not yet in the penalty counts; -1 where there is none."""
        if not step.placeholders:
            return None
        placeholders = {row for row, _ in step.placeholders}
        unseen = [spec.seen is not None and spec.row in placeholders for spec in step.samples]
        if not any(unseen):
            return None
        tokens = token_ids.index_select(0, self._sampled_rows(step))
        return torch.where(to_device([int(each) for each in unseen], self._device) > 0, tokens, -1)

    def _shared(self, drawn: SamplerOutput | None, count: int) -> Tensor:
        """[count] int64, the tokens drawn, on every rank of the stage."""
        if self._mesh.place.tp_size == self._mesh.place.cp_size == 1:
            assert drawn is not None
            return drawn.token_ids.to(self._device)
        # As float32, which every mesh can all-reduce; exact up to 2**24, beyond any vocabulary.
        tokens = torch.zeros(count, device=self._device) if drawn is None else drawn.token_ids.float()
        return self._mesh.gather_stripes(self._mesh.all_reduce(tokens))[0].long()


def _gpu_lost(step: StepInput, error: Exception) -> RankLost:
    """For an error after which the CUDA context is unusable; the cause may be an earlier step."""
    return RankLost(f"step {step.step_id} failed on the GPU: {error}")
