"""Captured decode steps against the plain runner, with a capture that replays tensor operations and no Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.decode_steps import random_decode
from support.oracle import TINY, make_tiny
from support.replaying import ReplayingCapture

from common.attention.cpu import CpuAttention
from common.attention.sdpa import SdpaAttention
from common.base.errors import EngineError
from common.base.variables import CPU_KERNELS
from common.control.messages import AttemptKey, SamplingParams
from common.engine import cuda_graphs
from common.engine.cuda_graphs import CannotCapture, DecodeGraphs, StepCapture, graph_sizes
from common.engine.runner import ModelRunner
from common.engine.step import RelayProgress, SampledToken, SampleSpec, StepInput
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.model.rank_model import HIDDEN
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace

BLOCK = 16
MAX_PAGES = 4
MAX_SEQS = 11
POOL = MAX_SEQS * MAX_PAGES
PAD = POOL
"""The block behind the pool's."""


@pytest.fixture(scope="module", autouse=True)
def torch_kernels() -> Iterator[None]:
    """A recorder of PyTorch's operations does not see what native kernels compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CPU_KERNELS, "torch")
        yield


class PlainOrStatic(CpuAttention):
    """The CPU's attention, whose captured sizes are gathered KV blocks: memory that never moves, and tensors only."""

    def for_graph(self, rows: int) -> SdpaAttention:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SdpaAttention(self._kv, self._shape).for_graph(rows)


@dataclass
class Rig:
    """One model over one KV memory, with and without captured steps."""

    model: DecoderModel
    storage: KVStorage
    plain: ModelRunner
    graphs: DecodeGraphs
    captured: ModelRunner


def make_rig(path: Path, capture: StepCapture, *, place: RankPlace | None = None) -> Rig:
    config = load_model_config(path)
    layout = KVLayout("f", kv_spec(config, "float32"))
    mesh = Mesh(place or RankPlace())
    pp_layers = () if place is None else (1, config.num_layers - 1)
    storage = KVStorage(layout, layout.shard(0, 0), POOL + 1)
    storage.groups[0].stacked.normal_(generator=torch.Generator().manual_seed(3))
    model = load_model(
        path, config, dtype="float32", load_format="auto", seed=0, small_batches=True, mesh=mesh, pp_layers=pp_layers
    )
    attention = PlainOrStatic(storage.groups[0], model.attention_shapes(BLOCK, MAX_PAGES * BLOCK)[0])
    graphs = DecodeGraphs(model, attention, max_num_seqs=MAX_SEQS, pad_block=PAD, block_size=BLOCK)
    graphs.capture(capture)
    return Rig(
        model, storage, ModelRunner(model, storage, attention), graphs, ModelRunner(model, storage, attention, graphs)
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("graphs")
    return {name: make_tiny(name, root / name) for name in ("llama3", "qwen3")}


@pytest.fixture(scope="module")
def rig(tiny: dict[str, Path]) -> Rig:
    return make_rig(tiny["llama3"], ReplayingCapture())


def padded(step: StepInput, size: int) -> StepInput:
    """`step` with the rows that fill it up to `size`, as any batch."""
    pad = size - len(step.query_lens)
    return StepInput(
        step_id=step.step_id,
        token_ids=step.token_ids + [0] * pad,
        positions=step.positions + [0] * pad,
        slot_mapping=[step.slot_mapping[0] + [PAD * BLOCK] * pad],
        query_lens=[1] * size,
        context_lens=step.context_lens + [1] * pad,
        block_tables=[step.block_tables[0] + [[PAD]] * pad],
        num_decode_seqs=size,
        samples=step.samples,
    )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (24, [1, 2, 4, 8, 16, 24]),
        (33, [1, 2, 4, 8, 16, 24, 32, 33]),
    ],
)
def test_sizes_end_with_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_replays_equal_the_eager_runner_bit_for_bit_at_every_batch_size(name: str, tiny: dict[str, Path]) -> None:
    capture = ReplayingCapture()
    replaying, eager = make_rig(tiny[name], capture), make_rig(tiny[name], StepCapture())
    assert capture.captured == len(replaying.graphs.sizes)
    rng = random.Random(7)
    vocab = TINY[name].vocab_size
    for num_seqs in [*range(1, MAX_SEQS + 1), *range(MAX_SEQS, 0, -1)]:
        step = random_decode(POOL, MAX_PAGES, rng, num_seqs, vocab)
        got, want = replaying.captured.execute(step), eager.captured.execute(step)
        assert got.sampled == want.sampled
        assert len(got.sampled) == num_seqs
        assert torch.equal(
            replaying.storage.groups[0].stacked[:, :, :POOL], eager.storage.groups[0].stacked[:, :, :POOL]
        )


def test_captured_steps_compute_what_the_plain_runner_does_and_leave_other_blocks_alone(rig: Rig) -> None:
    rng = random.Random(8)
    for num_seqs in range(1, MAX_SEQS + 1):
        step = random_decode(POOL, MAX_PAGES, rng, num_seqs, rig.model.config.vocab_size)
        before = rig.storage.groups[0].stacked.clone()
        captured = rig.captured.execute(step)
        kv = rig.storage.groups[0].stacked.clone()
        rig.storage.groups[0].stacked.copy_(before)
        plain = rig.plain.execute(step)
        assert [drawn.token_id for drawn in captured.sampled] == [drawn.token_id for drawn in plain.sampled]
        for got, want in zip(captured.sampled, plain.sampled, strict=True):
            assert got.logprobs is not None
            assert want.logprobs is not None
            assert got.logprobs.top_ids == want.logprobs.top_ids
            assert got.logprobs.top_logprobs == pytest.approx(want.logprobs.top_logprobs, abs=1e-4)
        torch.testing.assert_close(kv[:, :, :POOL], rig.storage.groups[0].stacked[:, :, :POOL], atol=1e-5, rtol=1e-5)
        written = sorted({slot // BLOCK for slot in step.slot_mapping[0]})
        others = [block for block in range(POOL) if block not in written]
        assert torch.equal(kv[:, :, others], before[:, :, others])


def test_rows_that_pad_change_nothing_whatever_their_block_holds(rig: Rig) -> None:
    rng = random.Random(9)
    for num_seqs in (3, 5, 9):
        step = random_decode(POOL, MAX_PAGES, rng, num_seqs, rig.model.config.vocab_size)
        before = rig.storage.groups[0].stacked.clone()
        outputs = []
        for garbage in (0.0, 1e30, torch.nan):
            rig.storage.groups[0].stacked.copy_(before)
            rig.storage.groups[0].stacked[:, :, PAD] = garbage
            outputs.append(rig.captured.execute(step).sampled)
        # The very rows that pad, but as sequences that the plain runner is told of.
        rig.storage.groups[0].stacked.copy_(before)
        rig.graphs.load(padded(step, rig.graphs.size_for(num_seqs)))
        hidden = rig.graphs.run(rig.graphs.size_for(num_seqs), None)[HIDDEN].clone()
        rig.storage.groups[0].stacked.copy_(before)
        rig.graphs.load(step)
        assert torch.equal(rig.graphs.run(num_seqs, None)[HIDDEN], hidden[:num_seqs])
        assert outputs[0] == outputs[1] == outputs[2]


def test_memory_never_moves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(10)
    places: dict[int, set[tuple[int, ...]]] = {}
    for num_seqs in [*range(1, MAX_SEQS + 1)] * 2:
        rows = rig.graphs.load(random_decode(POOL, MAX_PAGES, rng, num_seqs, rig.model.config.vocab_size))
        hidden = rig.graphs.run(num_seqs, None)[HIDDEN]
        assert {part.size(0) for part in (rows.token_ids, rows.positions, *rows.slots, hidden)} == {num_seqs}
        held = tuple(part.data_ptr() for part in (rows.token_ids, rows.positions, *rows.slots, hidden))
        places.setdefault(rig.graphs.size_for(num_seqs), set()).add(held)
    assert sorted(places) == rig.graphs.sizes
    assert all(len(held) == 1 for held in places.values())


def test_the_largest_size_is_captured_first(tiny: dict[str, Path]) -> None:
    graphs = make_rig(tiny["llama3"], StepCapture()).graphs
    assert list(graphs._captured) == sorted(graphs.sizes, reverse=True)  # pyright: ignore[reportPrivateUsage]


def test_token_ids_may_be_put_in_place_on_the_device_after_loading(rig: Rig) -> None:
    step = random_decode(POOL, MAX_PAGES, random.Random(11), 5, rig.model.config.vocab_size)
    before = rig.storage.groups[0].stacked.clone()
    rig.graphs.load(step)
    want = rig.graphs.run(5, None)[HIDDEN].clone()
    rig.storage.groups[0].stacked.copy_(before)
    rows = rig.graphs.load(StepInput(**{**vars(step), "token_ids": [0] * 5}))
    rows.token_ids.copy_(torch.tensor(step.token_ids))
    assert torch.equal(rig.graphs.run(5, None)[HIDDEN], want)


def test_steps_with_prompt_chunks_with_relays_or_too_many_rows_run_eagerly(rig: Rig) -> None:
    vocab = rig.model.config.vocab_size
    step = random_decode(POOL, MAX_PAGES, random.Random(12), 4, vocab)
    assert rig.graphs.takes(step)
    assert not rig.graphs.takes(StepInput(**{**vars(step), "relay": [RelayProgress(AttemptKey("r", 1), 1)]}))
    assert not rig.graphs.takes(StepInput(1, [1, 2], [0, 1], [[0, 1]], [2], [2], [[[0]]]))
    crowd = MAX_SEQS + 1
    assert not rig.graphs.takes(
        StepInput(
            1, [1] * crowd, [0] * crowd, [[0] * crowd], [1] * crowd, [1] * crowd, [[[0]] * crowd], num_decode_seqs=crowd
        )
    )
    chunk = StepInput(1, [1, 2, 3], [0, 1, 0], [[0, 1, 16]], [2, 1], [2, 1], [[[0], [1]]])
    layers: list[int] = []
    rig.captured.execute(chunk, layers.append)
    assert layers == [0, 1, 2]


def test_several_rows_of_one_decoding_sequence_are_replayed_as_the_rows_of_as_many_steps(rig: Rig) -> None:
    rng = random.Random(14)
    step = random_decode(POOL, MAX_PAGES, rng, 3, rig.model.config.vocab_size)
    table, params = step.block_tables[0][0], SamplingParams(seed=3, max_tokens=9, temperature=0.7)
    tokens = [rng.randrange(rig.model.config.vocab_size) for _ in range(4)]
    before = rig.storage.groups[0].stacked.clone()
    want: list[SampledToken] = []
    for at, token in enumerate(tokens, 30):
        spec = SampleSpec(0, 0, params, at + 1, 0)
        alone = StepInput(
            1, [token], [at], [[table[at // BLOCK] * BLOCK + at % BLOCK]], [1], [at + 1], [[table]], 1, [spec]
        )
        want += rig.plain.execute(alone).sampled
    kv = rig.storage.groups[0].stacked.clone()
    rig.storage.groups[0].stacked.copy_(before)
    several = StepInput(
        step_id=2,
        token_ids=tokens + step.token_ids[1:],
        positions=[30, 31, 32, 33, *step.positions[1:]],
        slot_mapping=[[table[at // BLOCK] * BLOCK + at % BLOCK for at in range(30, 34)] + step.slot_mapping[0][1:]],
        query_lens=[4, 1, 1],
        context_lens=[34, *step.context_lens[1:]],
        block_tables=step.block_tables,
        num_decode_seqs=3,
        samples=[SampleSpec(0, row, params, 31 + row, 0) for row in range(4)],
    )
    assert rig.graphs.takes(several)
    assert rig.graphs.size_for(len(several.token_ids)) == 8
    for runner in (rig.captured, rig.plain):
        rig.storage.groups[0].stacked.copy_(before)
        assert [token.token_id for token in runner.execute(several).sampled] == [token.token_id for token in want]
        torch.testing.assert_close(rig.storage.groups[0].stacked[:, :, table], kv[:, :, table], atol=1e-5, rtol=1e-5)


def test_a_step_that_does_not_fit_together_fails_alone(rig: Rig) -> None:
    step = random_decode(POOL, MAX_PAGES, random.Random(13), 4, rig.model.config.vocab_size)
    with pytest.raises(EngineError, match="do not fit"):
        rig.captured.execute(StepInput(**{**vars(step), "positions": step.positions[:3]}))
    assert len(rig.captured.execute(step).sampled) == 4


def test_a_later_stage_replays_on_what_it_received(tiny: dict[str, Path]) -> None:
    place = RankPlace(0, 1, 1, 2)
    replaying, eager = (
        make_rig(tiny["llama3"], capture, place=place) for capture in (ReplayingCapture(), StepCapture())
    )
    hidden_size = replaying.model.config.hidden_size
    for num_seqs in (4, 3, 1, 9):
        step = random_decode(POOL, MAX_PAGES, random.Random(num_seqs), num_seqs, 100)
        received = torch.randn(num_seqs, hidden_size)
        outputs = []
        for rig in (replaying, eager):
            kept = received.clone()
            rig.graphs.load(step)
            outputs.append(rig.graphs.run(num_seqs, {HIDDEN: kept})[HIDDEN].clone())
            assert torch.equal(kept, received)
        assert torch.equal(*outputs)
        assert not torch.equal(outputs[0], received)


@pytest.mark.parametrize(
    ("message", "raised"), [("called a synchronizing CUDA operation", CannotCapture), ("out of memory", RuntimeError)]
)
def test_only_waiting_for_the_gpu_keeps_steps_from_being_captured(
    message: str, raised: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's mode is put back whatever happens; other errors stay what they are."""
    modes: list[str | int] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def fail() -> None:
        raise RuntimeError(message)

    with pytest.raises(RuntimeError) as found:
        cuda_graphs._run_without_waiting(fail)
    assert type(found.value) is raised
    cuda_graphs._run_without_waiting(lambda: None)
    assert modes == ["error", 0] * 2
