"""Captured decode steps on a GPU: bit for bit what the same steps give launched; and the memory that a rank takes there."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.shape import Shape, make_model_folder
from support.decode_steps import random_decode

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, PrefillConfig
from common.engine.cuda_graphs import graph_sizes
from common.kv.cuda_pages import cuda_library
from common.node.kv_budget import CONTEXT_BYTES
from common.node.plan import plan_node
from common.node.profile_run import warm_up
from common.node.worker import Worker, load_worker
from common.parallel.mesh import SOLO

SHAPE = Shape("graphs", hidden=512, layers=4, q_heads=8, kv_heads=2, intermediate=1024, vocab=4096)
MAX_SEQS = 20
MAX_PAGES = 12
POOL = MAX_SEQS * MAX_PAGES


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecodeConfig:
    folder: Path = make_model_folder(SHAPE, tmp_path_factory.mktemp("graphs"))
    return DecodeConfig(
        model=str(folder), load_format="dummy", device="cuda", max_num_seqs=MAX_SEQS, max_model_len=2048, kv_blocks=POOL
    )


def started(config: DecodeConfig) -> Worker:
    """A rank as a node starts it."""
    worker = load_worker(plan_node(config), SOLO, small_batches=True)
    worker.allocate_kv(worker.max_blocks)
    worker.capture_graphs()
    worker.runner.execute(warm_up())
    return worker


def fill(worker: Worker) -> None:
    """The same KV everywhere, of ordinary size."""
    flat = worker.storage.groups[0].stacked.view(torch.uint8).flatten()
    noise = torch.randn(
        worker.storage.groups[0].stacked.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    )
    flat.copy_(noise.to(worker.storage.groups[0].stacked.dtype).view(torch.uint8).flatten())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_graphs_on_and_off_give_the_same_bits_at_every_batch_size(
    config: DecodeConfig, dtype: str, kv_cache_dtype: str
) -> None:
    config = replace(config, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    replayed, launched = started(config), started(replace(config, enforce_eager=True))
    for worker in (replayed, launched):
        fill(worker)
    rng = random.Random(1)
    for num_seqs in [*range(1, MAX_SEQS + 1), *range(MAX_SEQS, 0, -3)]:
        step = random_decode(POOL, MAX_PAGES, rng, num_seqs, SHAPE.vocab)
        assert replayed.runner.execute(step).sampled == launched.runner.execute(step).sampled
        kept = [worker.storage.groups[0].stacked[:, :, :POOL].view(torch.uint8) for worker in (replayed, launched)]
        assert torch.equal(*kept)


def test_a_replayed_step_costs_the_host_little(config: DecodeConfig) -> None:
    """Not a benchmark: a step of 4 layers must not be launched operation by operation."""
    worker = started(config)
    step = random_decode(POOL, MAX_PAGES, random.Random(2), 8, SHAPE.vocab)
    graphs = worker.runner._graphs  # pyright: ignore[reportPrivateUsage]
    assert graphs is not None
    graphs.load(step)
    durations: list[float] = []
    for _ in range(20):
        torch.cuda.synchronize()
        before = time.perf_counter()
        graphs.run(8, None)
        durations.append(time.perf_counter() - before)
    torch.cuda.synchronize()
    assert sorted(durations)[10] < 200e-6


def test_two_ranks_take_their_fractions_of_one_gpu_and_no_more(config: DecodeConfig) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    fraction = 0.2
    wanted = replace(config, kv_blocks=None, gpu_memory_utilization=fraction)
    ranks: list[Worker] = []
    for _ in range(2):
        ranks.append(started(wanted))
        for size in (MAX_SEQS, 1):
            ranks[-1].runner.execute(random_decode(POOL, MAX_PAGES, random.Random(3), size, SHAPE.vocab))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken = before - torch.cuda.mem_get_info()[0]
        # Both are in one process here, so its CUDA context is there once at most.
        assert taken <= len(ranks) * fraction * total
        assert taken >= len(ranks) * (fraction * total - CONTEXT_BYTES) * 0.9
    assert all(rank.max_blocks > POOL for rank in ranks)


def test_a_fraction_that_others_left_no_room_for_is_refused_in_one_sentence(config: DecodeConfig) -> None:
    free, total = torch.cuda.mem_get_info()
    library = cuda_library()
    assert library is not None
    # Not by PyTorch: that would count as this process's weights.
    hog = library.allocate(torch.device("cuda", 0), int(free - 0.1 * total))
    with pytest.raises(ConfigError, match=r"are free beside its weights and other processes"):
        started(replace(config, kv_blocks=None, gpu_memory_utilization=0.5))
    del hog
    with pytest.raises(ConfigError, match="leaves no room for KV"):
        started(replace(config, kv_blocks=None, gpu_memory_utilization=0.01))


def test_a_prefill_rank_captures_nothing(config: DecodeConfig) -> None:
    prefill = PrefillConfig(model=config.model, load_format="dummy", device="cuda", kv_blocks=64)
    worker = load_worker(plan_node(prefill), SOLO, small_batches=False)
    worker.allocate_kv(64)
    worker.capture_graphs()
    assert worker.storage.num_blocks == 64
    assert worker.runner._graphs is None  # pyright: ignore[reportPrivateUsage]


def test_every_size_is_captured(config: DecodeConfig) -> None:
    graphs = started(config).runner._graphs  # pyright: ignore[reportPrivateUsage]
    assert graphs is not None
    assert graphs.sizes == graph_sizes(MAX_SEQS) == [1, 2, 4, 8, 16, 20]
