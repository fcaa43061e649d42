"""How many KV blocks a GPU gets: the arithmetic, the steps that are run to measure it, and both in a node's start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.oracle import make_tiny
from support.sampling_cases import adjusted_on_device

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.engine.cuda_graphs import CannotCapture, StepCapture, graph_sizes
from common.engine.runner import ModelRunner
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.step import StepInput, StepOutput
from common.kv.rank_layout import blocks_for
from common.node.kv_budget import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    STAGING_BYTES,
    GpuMemoryUse,
    KvMemoryRequest,
    adapter_bytes,
    kv_blocks_on_gpu,
)
from common.node.plan import plan_node
from common.node.profile_run import Largest, decode_step, largest_steps, warm_up
from common.node.worker import Worker, load_worker
from common.parallel.mesh import SOLO

GB = 10**9
BLOCK = 2 * 10**6
USE = GpuMemoryUse(total=80 * GB, free=60 * GB, weights=16 * GB, activations=2 * GB, graphs=GB)


def test_the_largest_adapters_that_fit_in_memory_at_once_are_left_out_of_kv(tmp_path: Path) -> None:
    folders = [tmp_path / str(size) for size in (100, 300, 200)]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes(int(folder.name)))
    assert adapter_bytes(folders, 2) == 500
    assert adapter_bytes([], 8) == 0
    wish = KvMemoryRequest(0.5)
    without = kv_blocks_on_gpu(USE, wish, BLOCK, 0)
    assert kv_blocks_on_gpu(replace(USE, adapters=3 * BLOCK), wish, BLOCK, 0) == without - 3


def test_kv_gets_what_the_fraction_leaves_beside_everything_else() -> None:
    blocks = kv_blocks_on_gpu(USE, KvMemoryRequest(0.9), BLOCK, 1)
    assert blocks == (72 * GB - 19 * GB - CONTEXT_BYTES) // BLOCK - 1
    assert kv_blocks_on_gpu(USE, KvMemoryRequest(0.9), BLOCK, 0) == blocks + 1


def test_a_stated_size_or_number_wins_over_the_fraction() -> None:
    assert kv_blocks_on_gpu(USE, KvMemoryRequest(0.9, memory_bytes=GB), BLOCK, 1) == 500
    assert kv_blocks_on_gpu(USE, KvMemoryRequest(0.9, memory_bytes=GB, blocks=7), BLOCK, 1) == 7


def test_a_fraction_without_room_for_kv_is_refused_with_every_size() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_blocks_on_gpu(USE, KvMemoryRequest(0.2), BLOCK, 0)
    text = str(caught.value)
    for part in (
        "--gpu-memory-utilization 0.2 of 80.00 GB",
        "16.00 GB",
        "weights 16.00",
        "activations 2.00",
        "1.00 GB",
    ):
        assert part in text
    assert "\n" not in text


def test_memory_that_others_hold_is_refused_before_anything_is_allocated() -> None:
    crowded = replace(USE, free=30 * GB)
    with pytest.raises(ConfigError, match=r"of 80\.00 GB only 30\.00 GB are free"):
        kv_blocks_on_gpu(crowded, KvMemoryRequest(0.9), BLOCK, 1)
    with pytest.raises(ConfigError, match=r"30\.00 GB are free"):
        kv_blocks_on_gpu(crowded, KvMemoryRequest(0.1, blocks=14_000), BLOCK, 1)
    assert kv_blocks_on_gpu(crowded, KvMemoryRequest(0.5), BLOCK, 1) > 2


def test_two_nodes_on_one_card_fit_side_by_side_by_their_fractions() -> None:
    first = replace(USE, free=80 * GB - CONTEXT_BYTES - 16 * GB)
    taken = CONTEXT_BYTES + 16 * GB + kv_blocks_on_gpu(first, KvMemoryRequest(0.45), BLOCK, 0) * BLOCK + 3 * GB
    assert taken <= 0.45 * 80 * GB
    second = replace(USE, free=80 * GB - taken - CONTEXT_BYTES - 16 * GB)
    assert (
        kv_blocks_on_gpu(second, KvMemoryRequest(0.45), BLOCK, 1)
        == kv_blocks_on_gpu(first, KvMemoryRequest(0.45), BLOCK, 0) - 1
    )
    with pytest.raises(ConfigError, match="other nodes on this GPU"):
        kv_blocks_on_gpu(second, KvMemoryRequest(0.6), BLOCK, 1)


sizes = st.integers(0, 40 * GB)


@given(
    sizes,
    sizes,
    sizes,
    st.integers(0, 80 * GB),
    st.floats(0.01, 1.0),
    st.integers(10**3, 10**8),
    st.integers(0, 1),
)
def test_what_is_promised_never_exceeds_the_fraction_nor_what_is_free(
    weights: int, activations: int, graphs: int, free: int, fraction: float, block: int, spare: int
) -> None:
    use = GpuMemoryUse(80 * GB, free, weights, activations, graphs)
    try:
        blocks = kv_blocks_on_gpu(use, KvMemoryRequest(fraction), block, spare)
    except ConfigError:
        return
    kv = (blocks + spare) * block
    assert use.rest + kv <= fraction * use.total
    assert kv + activations + graphs <= free
    # Another block would break the fraction.
    assert use.rest + kv + block > int(fraction * use.total)


@pytest.mark.parametrize(
    "largest",
    [Largest(512, 4096, 64), Largest(256, 100, 64), Largest(64, 4096, 64), Largest(100, 40, 3), Largest(7, 1, 9)],
)
def test_the_largest_steps_use_every_row_and_sample_for_every_sequence(largest: Largest) -> None:
    one, many = largest_steps(largest)
    assert one.query_lens == [min(largest.rows, largest.context)]
    assert len(many.query_lens) == min(largest.num_seqs, largest.rows)
    assert sum(many.query_lens) == min(largest.rows, len(many.query_lens) * largest.context)
    for step in (one, many, decode_step(largest, largest.num_seqs)):
        rows = sum(step.query_lens)
        [slots], [tables] = step.slot_mapping, step.block_tables
        assert len(step.token_ids) == len(step.positions) == len(slots) == rows
        assert len(step.samples) == len(step.query_lens) == len(step.context_lens)
        assert max(step.context_lens) <= largest.context
        assert max(slots) < largest.blocks * 16
        assert all(len(table) >= blocks_for(n) for table, n in zip(tables, step.context_lens, strict=True))


def test_the_largest_steps_sample_in_all_ways_that_take_memory() -> None:
    _, many = largest_steps(Largest(64, 100, 8))
    logits = torch.zeros(8, 512)
    assert adjusted_on_device(logits, many.samples) is not logits, "penalties change a copy"
    drawn = [spec.params for spec in many.samples if spec.params.temperature > 0]
    assert len(drawn) == 7, "one that is greedy, so that the others are copied"
    assert all(p.top_p < 1 and p.top_k and p.min_p and p.logprobs for p in drawn)
    assert DeviceSampler().sample(logits, many.samples, None).wait()


class FakeMeter:
    """A GPU of one tenth of a gigabyte on which every look finds a little more in use."""

    def __init__(self) -> None:
        self.looks: list[str] = []

    def used(self) -> int:
        self.looks.append("used")
        return 10**6

    def start(self) -> None:
        self.looks.append("start")

    def peak(self) -> int:
        self.looks.append("peak")
        return 5 * 10**6

    def gpu(self) -> tuple[int, int]:
        self.looks.append("gpu")
        return 10**9, 2 * 10**9


class KeepingCapture(StepCapture):
    """Counts as CUDA graphs do."""

    keeps_memory = True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("memory") / "llama"))


def load(config: DecodeConfig, **parts: Any) -> Worker:
    """A rank on the CPU that counts its memory and records its steps as one on a GPU does."""
    plain = load_worker(plan_node(config), SOLO, small_batches=True)
    return Worker(plain.plan, SOLO, plain._model, **parts)  # pyright: ignore[reportPrivateUsage]


def test_a_rank_on_a_gpu_runs_its_largest_steps_then_counts_its_blocks(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    execute = ModelRunner.execute

    def watched(self: ModelRunner, step: StepInput, *args: Any) -> StepOutput:
        ran.append(len(step.query_lens))
        return execute(self, step, *args)

    monkeypatch.setattr(ModelRunner, "execute", watched)
    config = DecodeConfig(
        model=model, max_num_seqs=5, max_num_batched_tokens=40, gpu_memory_utilization=0.5, kv_transport="zmq"
    )
    meter = FakeMeter()
    worker = load(config, meter=meter, graph_capture=KeepingCapture())
    # The longest chunk, the most sequences, one row, the largest decode step; the GPU is looked at last, with all of it
    # gone.
    assert ran == [1, 5, 1, 5]
    assert meter.looks[-1] == "gpu"
    use = GpuMemoryUse(2 * 10**9, 10**9, 10**6, 4 * 10**6, len(graph_sizes(5)) * GRAPH_BYTES + 4 * 10**6)
    per_block = worker.plan.layout.spec.bytes_per_block
    assert worker.max_blocks == kv_blocks_on_gpu(use, KvMemoryRequest(0.5), per_block, 1)


def test_without_cuda_graphs_no_memory_is_set_aside_for_them(model: str) -> None:
    """`--enforce-eager` runs the same padded steps, on the same static memory of attention, and keeps nothing else."""
    config = DecodeConfig(
        model=model, max_num_seqs=5, max_num_batched_tokens=40, gpu_memory_utilization=0.5, kv_transport="zmq"
    )
    eager, kept = (load(config, meter=FakeMeter(), graph_capture=each()) for each in (StepCapture, KeepingCapture))
    use = GpuMemoryUse(2 * 10**9, 10**9, 10**6, 4 * 10**6, graphs=0)
    per_block = eager.plan.layout.spec.bytes_per_block
    assert eager.max_blocks == kv_blocks_on_gpu(use, KvMemoryRequest(0.5), per_block, 1)
    assert eager.max_blocks - kept.max_blocks >= len(graph_sizes(5)) * GRAPH_BYTES // per_block


def test_buffers_of_relays_by_nccl_are_counted_where_there_may_be_some(model: str) -> None:
    blocks = {
        transport: load(
            DecodeConfig(model=model, max_num_seqs=5, gpu_memory_utilization=0.5, kv_transport=transport),
            meter=FakeMeter(),
            graph_capture=StepCapture(),
        )
        for transport in ("auto", "collective", "cuda_ipc")
    }
    assert blocks["auto"].max_blocks == blocks["collective"].max_blocks
    fewer = blocks["cuda_ipc"].max_blocks - blocks["auto"].max_blocks
    assert abs(fewer - STAGING_BYTES // blocks["auto"].plan.layout.spec.bytes_per_block) <= 1


def test_steps_that_will_not_be_captured_get_no_memory(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.node.worker.worth_capturing", lambda attention, max_context: False)
    config = DecodeConfig(
        model=model, max_num_seqs=5, max_num_batched_tokens=40, gpu_memory_utilization=0.5, kv_transport="zmq"
    )
    worker = load(config, meter=FakeMeter(), graph_capture=KeepingCapture())
    use = GpuMemoryUse(2 * 10**9, 10**9, 10**6, 4 * 10**6, graphs=0)
    assert worker.max_blocks == kv_blocks_on_gpu(use, KvMemoryRequest(0.5), worker.plan.layout.spec.bytes_per_block, 1)
    worker.allocate_kv(20)
    worker.capture_graphs()
    assert "decode steps are not captured" in caplog.text


def test_a_rank_that_records_has_one_block_more_than_its_pool(model: str) -> None:
    config = DecodeConfig(model=model, max_num_seqs=5, kv_blocks=20)
    capturing, plain = load(config, graph_capture=StepCapture()), load(config)
    outputs: list[StepOutput] = []
    for worker in (capturing, plain):
        worker.allocate_kv(worker.max_blocks)
        worker.capture_graphs()
        outputs.append(worker.runner.execute(warm_up()))
    assert (capturing.max_blocks, capturing.storage.num_blocks) == (20, 21)
    assert (plain.max_blocks, plain.storage.num_blocks) == (20, 20)
    assert outputs[0].sampled == outputs[1].sampled


def test_a_model_that_reads_values_on_the_cpu_runs_without_captured_steps(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Unable:
        keeps_memory = False

        def capture(self, run: Any) -> Any:
            raise CannotCapture("the model waits for the GPU")

    worker = load(DecodeConfig(model=model, kv_blocks=20), graph_capture=Unable())
    worker.allocate_kv(20)
    worker.capture_graphs()
    assert "not captured as CUDA graphs, which makes small ones slower: the model waits for the GPU" in caplog.text
    assert worker.runner.execute(warm_up()).sampled


def test_a_step_that_cannot_be_captured_says_what_helps(model: str) -> None:
    class Broken:
        def capture(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    worker = load(DecodeConfig(model=model, kv_blocks=20), graph_capture=Broken())
    worker.allocate_kv(20)
    with pytest.raises(ConfigError, match=r"not permitted when stream is capturing.*--enforce-eager runs without them"):
        worker.capture_graphs()
