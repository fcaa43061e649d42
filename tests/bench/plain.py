"""The engine without a service, for comparison and for figures that are not visible from outside. A worker process.

`decode` and `prefill` are the plain eager loop over the same model code that the nodes run. `overhead` drives a
decode node's real core, scheduler and executor, without sockets.
"""

from __future__ import annotations

import random
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from bench.overhead_node import GREEDY, OverheadNode, StubRunner
from bench.results import median, percentile
from support.lora_files import write_adapter

from common.base.device import configure_torch
from common.base.hashing import BLOCK_SIZE
from common.config.service_configs import DecodeConfig
from common.control.messages import Grammar
from common.engine.step import SampleSpec, StepInput
from common.kernels.native.find import find_native
from common.model.lora.checkpoint import open_adapter
from common.node.parts import make_pool, make_scheduler
from common.node.plan import plan_node
from common.node.worker import load_worker
from common.parallel.mesh import SOLO


class Plain:
    """One loaded model. Sequences lie in blocks 0, 1, 2, ... of its KV storage, none of them kept between calls."""

    def __init__(self, folder: str) -> None:
        config = DecodeConfig(model=folder, load_format="dummy", dtype="bfloat16", kv_memory_gb=0.5)
        configure_torch(None)
        plan = self._plan = plan_node(config, prefill_chunk=config.local_prefill_chunk)
        worker = load_worker(plan, SOLO, small_batches=True)
        worker.allocate_kv(worker.max_blocks)
        self._adapters = worker.adapters
        self._runner = worker.runner
        self._scheduler = make_scheduler(plan, make_pool(plan, worker.max_blocks))
        self._rng = random.Random(1)
        self._step_id = 0

    def load_adapters(self, count: int, rank: int) -> None:
        """Load LoRA adapters of all linear layers, with the ids 1 ... count."""
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1, count + 1):
                path = write_adapter(Path(folder) / str(number), self._plan.path, rank=rank, seed=number)
                checkpoint = open_adapter(path, self._plan.model_config)
                self._adapters.load(number, checkpoint, checkpoint.digest(checkpoint.read()))

    def decode(self, batch: int, context: int, steps: int, adapters: int = 0) -> dict[str, float]:
        """Greedy tokens for `batch` sequences that begin with `context` slots of KV, spread over the first `adapters`.
        Returns tokens/s and step times."""
        ids = [1 + i * adapters // batch for i in range(batch)] if adapters else []
        blocks_each = -(-(context + steps) // BLOCK_SIZE)
        tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(batch)]
        tokens = self._random_tokens(batch)
        times = []
        for step in range(steps):
            started = time.perf_counter()
            tokens = self._run(tokens, [1] * batch, [context + step + 1] * batch, tables, sample=True, adapters=ids)
            times.append(time.perf_counter() - started)
        return {
            "tokens_per_s": batch * steps / sum(times),
            "median_step_s": median(times),
            "p99_step_s": percentile(times, 0.99),
        }

    def prefill(self, tokens: int, chunk: int, adapter: int = 0) -> float:
        """Seconds for a prompt in chunks, its first token drawn."""
        ids = [adapter] if adapter else []
        table = [list(range(-(-tokens // BLOCK_SIZE)))]
        prompt = self._random_tokens(tokens)
        started = time.perf_counter()
        for at in range(0, tokens, chunk):
            rows = prompt[at : at + chunk]
            self._run(rows, [len(rows)], [at + len(rows)], table, sample=at + chunk >= tokens, adapters=ids)
        return time.perf_counter() - started

    def overhead(self, batch: int, prompt: int, steps: int, stub: bool) -> dict[str, Any]:
        """Wall and forward time of a decode node's rounds with `batch` running sequences."""
        runner = StubRunner() if stub else self._runner
        node = OverheadNode(self._plan, self._scheduler, runner)
        return node.measure([self._random_tokens(prompt) for _ in range(batch)], steps)

    def python_share(self, batch: int, prompt: int, steps: int) -> dict[str, float]:
        """Seconds of a decode node's round with `batch` running sequences, and its part outside the native kernels."""
        native = find_native()
        assert native is not None
        inside: list[float] = []
        forward = native.model_forward

        def timed(*arguments: Any) -> None:
            started = time.perf_counter()
            forward(*arguments)
            inside.append(time.perf_counter() - started)

        native.model_forward = cast("Any", timed)
        try:
            wall_s = self.overhead(batch, prompt, steps, stub=False)["wall_s"]
        finally:
            native.model_forward = forward
        return {"step_s": wall_s / steps, "share": 1 - sum(inside[-steps:]) / wall_s}

    def sampled(self, batch: int, prompt: int, steps: int, grammar: str, sampling: dict[str, Any]) -> float:
        """Seconds of a decode node's round with `batch` sequences of these sampling parameters. The prompts are always the
        same, so that all calls but the first find their KV cached."""
        self._rng.seed(1)
        params = GREEDY._replace(**sampling, grammar=Grammar(grammar) if grammar else None)
        node = OverheadNode(self._plan, self._scheduler, self._runner)
        measured = node.measure([self._random_tokens(prompt) for _ in range(batch)], steps, params)
        return measured["wall_s"] / steps

    def _random_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._plan.model.vocab_size) for _ in range(count)]

    def _run(
        self,
        rows: list[int],
        query_lens: list[int],
        context_lens: list[int],
        tables: list[list[int]],
        *,
        sample: bool,
        adapters: list[int],
    ) -> list[int]:
        self._step_id += 1
        positions = [position for q, c in zip(query_lens, context_lens, strict=True) for position in range(c - q, c)]
        owners = [i for i, q in enumerate(query_lens) for _ in range(q)]
        step = StepInput(
            step_id=self._step_id,
            token_ids=rows,
            positions=positions,
            slot_mapping=[
                [
                    tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                    for i, p in zip(owners, positions, strict=True)
                ]
            ],
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=[tables],
            num_decode_seqs=len(query_lens) if max(query_lens) == 1 else 0,
            samples=[SampleSpec(i, end - 1, GREEDY, context_lens[i], 0) for i, end in enumerate(accumulate(query_lens))]
            if sample
            else [],
            adapters=adapters,
        )
        return [drawn.token_id for drawn in self._runner.execute(step).sampled]
