"""The engine on a GPU without a service around it: the very runner of a node, its captured graphs included. A worker."""

from __future__ import annotations

import random
import time
from itertools import accumulate, pairwise
from typing import Any

import torch

from common.base.device import configure_torch
from common.base.hashing import BLOCK_SIZE
from common.config.option_groups import Quantization
from common.config.service_configs import DecodeConfig
from common.control.messages import SamplingParams
from common.engine.runner import LaunchedStep
from common.engine.step import SampleSpec, StepInput
from common.node.plan import plan_node
from common.node.worker import load_worker
from common.parallel.mesh import SOLO

_GREEDY = SamplingParams(seed=0, max_tokens=1 << 30, temperature=0.0)
_WARM_UP = 3


class Engine:
    """One loaded model. Sequences lie in blocks 0, 1, 2, ... of its KV storage, none of them kept between calls."""

    def __init__(
        self,
        folder: str,
        device: str,
        kv_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        quantization: Quantization = "auto",
    ) -> None:
        config = DecodeConfig(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            device=device,  # pyright: ignore[reportArgumentType]
            kv_blocks=kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=True,
            quantization=quantization,
        )
        configure_torch(None)
        plan = plan_node(config)
        worker = load_worker(plan, SOLO, small_batches=True)
        worker.allocate_kv(worker.max_blocks)
        worker.capture_graphs()
        self._runner = worker.runner
        self._vocab_size = plan.model.vocab_size
        self._is_gpu = torch.device(device).type == "cuda"
        self._rng = random.Random(1)
        self._steps = 0

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each greedy step for `batch` sequences that begin with `context` slots of KV, from one step's tokens
        to the next one's, each step prepared while the one before runs."""
        step = self._decode_steps(batch, context)
        ends_s = []
        for _ in range(_WARM_UP + steps):
            step()
            ends_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends_s[_WARM_UP - 1 :])]

    def prefill(self, tokens: int, chunk: int, times: int) -> list[float]:
        """Seconds of a prompt in chunks, its first token drawn."""
        table = [list(range(-(-tokens // BLOCK_SIZE)))]
        prompt = self._tokens(tokens)

        def whole() -> None:
            for at in range(0, tokens, chunk):
                rows = prompt[at : at + chunk]
                self._launch(rows, [len(rows)], [at + len(rows)], table, sample=at + chunk >= tokens).wait()

        return [_timed(whole) for _ in range(times + 1)][1:]

    def busy_s(self, batch: int, context: int, steps: int) -> float:
        """Seconds of a decode step during which a kernel runs (on a processor: an operator), by the profiler."""
        step = self._decode_steps(batch, context)
        for _ in range(_WARM_UP):
            step()
        activity = torch.profiler.ProfilerActivity
        kind = activity.CUDA if self._is_gpu else activity.CPU
        with torch.profiler.profile(activities=[kind]) as profile:
            for _ in range(steps):
                step()
        wanted = "CUDA" if self._is_gpu else "CPU"
        events: Any = profile.events()
        spans = sorted((e.time_range.start, e.time_range.end) for e in events if str(e.device_type).endswith(wanted))
        return _covered_us(spans) / 1e6 / steps

    def _decode_steps(self, batch: int, context: int) -> Any:
        """A function that starts the next step each time, with the tokens of the one before, and waits for that one."""
        blocks_each = -(-(context + 256) // BLOCK_SIZE)
        tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(batch)]
        running = self._launch(self._tokens(batch), [1] * batch, [context + 1] * batch, tables, sample=True)
        length = context + 1

        def step() -> None:
            nonlocal running, length
            length += 1
            before = running
            placeholders = [(row, row) for row in range(batch)]
            running = self._launch(
                [0] * batch, [1] * batch, [length] * batch, tables, sample=True, placeholders=placeholders
            )
            before.wait()

        return step

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def _launch(
        self,
        rows: list[int],
        query_lens: list[int],
        context_lens: list[int],
        tables: list[list[int]],
        *,
        sample: bool,
        placeholders: list[tuple[int, int]] | None = None,
    ) -> LaunchedStep:
        """`placeholders`: for tokens of the step launched before."""
        places = [
            (i, p) for i, (q, c) in enumerate(zip(query_lens, context_lens, strict=True)) for p in range(c - q, c)
        ]
        self._steps += 1
        step = StepInput(
            step_id=self._steps,
            token_ids=rows,
            positions=[p for _, p in places],
            slot_mapping=[[tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in places]],
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=[tables],
            num_decode_seqs=len(query_lens) if max(query_lens) == 1 else 0,
            samples=[
                SampleSpec(i, end - 1, _GREEDY, context_lens[i], 0) for i, end in enumerate(accumulate(query_lens))
            ]
            if sample
            else [],
            placeholder_step=self._steps - 1 if placeholders else 0,
            placeholders=placeholders or [],
        )
        return self._runner.launch(step)


def _timed(run: Any) -> float:
    """Until nothing runs on the device any more."""
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _covered_us(spans: list[tuple[float, float]]) -> float:
    """The length of the union of these spans, which are in order of their beginnings."""
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
