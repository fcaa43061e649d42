"""A scheduler and a tiny model that run requests with many kinds of sampling to their end, in a pool that is too small."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.drafting import Drafting
from common.engine.runner import LaunchedStep, ModelRunner
from common.engine.sampling.base import Sampler
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.kv_spec import in_one_table, kv_spec
from common.model.loader import load_model

NUM_BLOCKS = 12
VOCAB = 256


def make_runner(path: Path, *, overlaps: bool, sampler: Sampler | None = None, one_table: bool = False) -> ModelRunner:
    config = load_model_config(path)
    spec = kv_spec(config, "float32")
    layout = KVLayout("f", in_one_table(spec) if one_table else spec)
    storage = KVStorage(layout, layout.shard(0, 0), NUM_BLOCKS * layout.spec.num_tables)
    model = load_model(path, config, dtype="float32", load_format="auto", seed=0, small_batches=True)
    return ModelRunner(
        model,
        storage,
        attention_of_groups(storage, model.attention_shapes(16), CpuAttention),
        sampler=sampler,
        overlaps=overlaps,
    )


def sequences() -> list[Sequence]:
    """Every kind of sampling that looks back: penalties, banned tokens and sequences, masks, log-probabilities."""
    draw = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 1.2, "presence_penalty": 1.5, "top_k": 40},
        {"temperature": 2.0, "stop_token_ids": list(range(0, VOCAB, 5)), "min_tokens": 12},
        {"temperature": 0.0, "frequency_penalty": 2.0, "logprobs": 0},
        {"temperature": 0.9, "bad_words": [[a, b] for a in range(VOCAB) for b in range(0, 64, 7)] + [[200], [3, 1, 4]]},
        {"temperature": 1.5, "allowed_token_ids": list(range(3, VOCAB, 9)), "bad_words": [[3]], "logprobs": 1},
    ]
    made = []
    for n in range(12):
        prompt = [draw.randrange(3, VOCAB - 3) for _ in range(draw.randrange(1, 30))]
        params = SamplingParams(**{"seed": n, "max_tokens": draw.randrange(40, 70), **kinds[n % len(kinds)]})
        made.append(
            Sequence(AttemptKey(f"r{n}", 1), EngineRequest(pack_ids(prompt), params), list(prompt), root_hash("f"), 0.0)
        )
    return made


def answers(
    path: Path,
    depth: int,
    sampler: Sampler | None = None,
    propose: Callable[[Sequence], list[int]] | None = None,
    *,
    runner: ModelRunner | None = None,
    drafting: Drafting | None = None,
) -> tuple[dict[AttemptKey, list[SampledToken]], Scheduler]:
    """Run all sequences to their end, with `depth` steps in flight whose outputs arrive as late as possible.

    `propose`: drafts for a sequence whose tokens are all known. `runner`: by default a new one.
    """
    spec = kv_spec(load_model_config(path), "float32")
    pool = BlockPool(NUM_BLOCKS * spec.num_tables, spec.num_tables)
    scheduler = Scheduler(SchedulerConfig(128, 6, 32, 8, depth=depth), pool, spec.windows, drafting)
    runner = runner or make_runner(path, overlaps=depth > 1, sampler=sampler)
    got: dict[AttemptKey, list[SampledToken]] = {}
    for seq in sequences():
        scheduler.add(seq)
    flying: deque[tuple[ScheduledStep, LaunchedStep]] = deque()
    while True:
        scheduled = scheduler.schedule()
        if scheduled is not None:
            flying.append((scheduled, runner.launch(scheduled.step)))
        elif not flying:
            break
        if scheduled is None or len(flying) == depth:
            landing, launched = flying.popleft()
            for done in scheduler.update(landing, launched.wait().sampled):
                got.setdefault(done.seq.key, []).extend(done.tokens)
            for seq in scheduler.running.values():
                if propose is not None and seq.progress.num_pending == 0:
                    seq.tokens.draft_ids = propose(seq)
    assert scheduler.is_idle()
    assert scheduler.pool.num_used == 0
    return got, scheduler
