"""A model spread over ranks: the same tokens and the same KV as on one, each rank reading its own part alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import oracle
from support.oracle import make_tiny
from support.paths import ROOT
from support.rank_processes import Case, Outcome, run_ranks
from support.recording import Recorder, Recording
from support.runner_cases import drive, make_runner, prompt
from support.tiny_models import Tiny
from transformers import LlamaConfig

from common.base.errors import ConfigError
from common.control.messages import PromptLogprobs
from common.model.build import Build
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.description import MixtureDescription, MlpDescription
from common.model.loader import load_model
from common.model.mixture.experts import ExpertLoop
from common.model.precision import Precision
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights, DummyWeights, WeightSource
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace

WANT = 6
TWO_LOGITS_ARE_ALIKE = 1e-4

_ONE_KV_HEAD: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "intermediate_size": 90,
    "vocab_size": 255,
    "num_hidden_layers": 5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "mlp_bias": True,
}
"""8 x 1 heads, five layers, an inner size that four ranks cannot share evenly."""


@dataclass(frozen=True)
class Recorded:
    """A model and what it does on one rank."""

    model: Path
    file: Path
    recording: Recording


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    return _Recordings(tmp_path_factory.mktemp("shards"))


class _Recordings(dict[str, Recorded]):
    """Of each model, made when it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Recorded:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(oracle.TINY, "one-kv-head", Tiny(LlamaConfig(**_ONE_KV_HEAD)))
            self[name] = _record(name, self._root)
        return self[name]


def _record(name: str, root: Path) -> Recorded:
    model = make_tiny(name, root / name)
    runner = make_runner(model)
    vocab = load_model_config(model).vocab_size
    recorder = Recorder(runner)
    drive(recorder, [prompt(n, vocab) for n in (1, 33, 70)], 16, WANT)
    file = root / f"{name}.pickle"
    return Recorded(model, file, recorder.write(file))


LAYOUTS: dict[str, list[tuple[int, list[int]]]] = {
    "llama": [(tp, pp) for tp in (1, 2, 4) for pp in ([3], [2, 1], [1, 1, 1]) if (tp, pp) != (1, [3])],
    "llama-biases": [(2, [3]), (4, [1, 2]), (2, [1, 1, 1])],
    "qwen2": [(2, [3]), (14, [3]), (1, [1, 2])],
    "qwen3": [(4, [3]), (2, [2, 1])],
    "one-kv-head": [(2, [5]), (4, [1, 4]), (2, [2, 1, 2]), (8, [5])],
    "olmo2": [(4, [1, 2])],
    "phi3": [(4, [3]), (2, [2, 1])],
    "granite": [(2, [3]), (2, [1, 2])],
    "smollm3": [(4, [3]), (2, [1, 1, 1])],
    "starcoder2": [(4, [3]), (2, [2, 1])],
    "gpt2": [(4, [3]), (2, [1, 2])],
    "opt": [(2, [3]), (2, [2, 1])],
    "gemma3": [(4, [3]), (2, [1, 1, 1])],
    "qwen3-moe": [(2, [2, 1]), (4, [3])],
    "gpt-oss": [(4, [1, 2]), (2, [3])],
    "glm4-moe": [(4, [3]), (2, [1, 2])],
    "mixtral": [(4, [3]), (1, [2, 1])],
    "granite-moe": [(4, [3]), (2, [2, 1])],
}
"""Per model, ranks of a stage and layers of each stage. KV heads: 4, 2, 2, 2, 1; 2 and 4. Experts: 8, 6, 8, 4, 5."""
CASES = [
    pytest.param(name, same_host, marks=[] if is_default else [pytest.mark.thorough])
    for number, name in enumerate(LAYOUTS)
    for same_host in (True, False)
    for is_default in [number < 5 or (name in ("olmo2", "gpt-oss") and same_host)]
]


@pytest.mark.parametrize(("name", "same_host"), CASES)
def test_every_layout_draws_what_one_rank_draws(recorded: dict[str, Recorded], name: str, same_host: bool) -> None:
    layouts = LAYOUTS[name] if same_host else LAYOUTS[name][-2:]
    known = recorded[name]
    arguments = {"model": str(known.model), "recording": str(known.file), "same_host": same_host}
    cases = [Case(tp, len(pp), {**arguments, "pp_layers": pp}) for tp, pp in layouts]
    for layout, outcomes in zip(layouts, run_ranks("support.rank_jobs:replay", cases), strict=True):
        assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == [], layout
        assert max(outcome.value["kv_error"] for outcome in outcomes) < 1e-3, layout
        last = outcomes[-layout[0]]
        _same_tokens(known.recording, last, layout)
        for other in outcomes:
            assert other is last or (other.value["tokens"] == [] and not any(other.value["prompt_logprobs"])), layout


def _same_tokens(recording: Recording, outcome: Outcome, layout: tuple[int, list[int]]) -> None:
    expected = [token for output in recording.outputs for token in output.sampled]
    assert len(outcome.value["tokens"]) == len(expected) == 3 * WANT
    for token, drawn, logprob in zip(expected, outcome.value["tokens"], outcome.value["logprobs"], strict=True):
        assert token.logprobs is not None
        best, second = token.logprobs.top_logprobs
        assert token.token_id == drawn or best - second < TWO_LOGITS_ARE_ALIKE, layout
        assert logprob == pytest.approx(token.logprobs.logprob, abs=1e-3), layout
    scored = [each for output in recording.outputs for found in output.prompt_logprobs for each in found]
    got = [PromptLogprobs(*each) for found in outcome.value["prompt_logprobs"] for each in found]
    assert [each.logprob for each in got] == pytest.approx([each.logprob for each in scored], abs=1e-3), layout
    assert len(got) == 32 + 69


def test_a_rank_killed_in_a_step_is_reported_by_the_others(recorded: dict[str, Recorded]) -> None:
    known = recorded["llama"]
    arguments = {"model": str(known.model), "recording": str(known.file), "lost": 1}
    (outcomes,) = run_ranks("support.rank_jobs:lose_a_rank_in_a_step", [Case(2, 1, arguments)])
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].value == "rank 1 has ended; rank 0 waited for it"


def build(recorded: Recorded, place: RankPlace, weights: WeightSource, pp: tuple[int, ...] = ()) -> Build:
    config = load_model_config(recorded.model)
    return Build(config, weights, Precision.choose("float32", small_batches=True), Mesh(place), pp)


@pytest.mark.parametrize("source", ["files", "dummy"])
def test_shares_put_together_are_the_whole(recorded: dict[str, Recorded], source: str) -> None:
    known = recorded["one-kv-head"]
    weights = CheckpointWeights(known.model) if source == "files" else DummyWeights(5)
    config = load_model_config(known.model)
    shares = [build(known, RankPlace(tp_rank=r, tp_size=4), weights) for r in range(4)]
    name, shape = "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    whole = weights.read(name, shape, torch.float32)
    rows = torch.cat([share.vocabulary(name) for share in shares])
    assert torch.equal(rows[: config.vocab_size], whole)
    assert torch.equal(rows[config.vocab_size :], torch.zeros(1, config.hidden_size))
    mlp = config.layers[4].mlp
    assert isinstance(mlp, MlpDescription)
    x = torch.randn(3, mlp.inner_size, generator=torch.Generator().manual_seed(0))
    prefix = "model.layers.4.mlp.down_proj"
    with torch.inference_mode():
        summed = sum(
            share.row_linear(prefix, inner, config.hidden_size, bias=True).forward(
                x[:, inner.lo : inner.hi].contiguous()
            )
            for share in shares
            for inner in [share.inner(mlp)]
        )
    full = weights.read(f"{prefix}.weight", (config.hidden_size, mlp.inner_size), torch.float32)
    bias = weights.read(f"{prefix}.bias", (config.hidden_size,), torch.float32)
    assert isinstance(summed, torch.Tensor)
    torch.testing.assert_close(summed, x @ full.T + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-moe", "granite-moe"])
def test_a_rank_holds_its_share_of_the_experts_and_reads_no_others(recorded: dict[str, Recorded], name: str) -> None:
    """Five experts on four ranks; of eight, each of three ranks has two or three."""
    known, ranks = recorded[name], 4 if name == "granite-moe" else 3
    mixture = load_model_config(known.model).layers[2].mlp
    assert isinstance(mixture, MixtureDescription)
    experts: list[int] = []
    for rank in range(ranks):
        source = _Counting(CheckpointWeights(known.model))
        place = RankPlace(tp_rank=rank, tp_size=ranks)
        loop = ExpertLoop(build(known, place, source), "model.layers.2.", mixture)
        own = range(loop.first, loop.first + len(loop.downs))
        experts += own
        if name == "qwen3-moe":
            assert {int(each.split(".")[5]) for each in source.names} == set(own)
        else:
            assert {part.lo for part in source.parts} == set(own)
    assert experts == list(range(mixture.router.num_experts))


class _Counting:
    """A source that remembers which tensors, and which parts of them, were asked for."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.names: list[str] = []
        self.parts: list[Part] = []

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def read(self, name: str, *rest: Any, **options: Any) -> torch.Tensor:
        self.names.append(name)
        self.parts += [each for each in rest if isinstance(each, Part)]
        return self._source.read(name, *rest, **options)

    def view(self, *_: Any) -> None:
        return None

    def linear(self, stacked: Any, bias: Any, target: Any) -> None:
        return None

    def tied(self, embedding: str, lm_head: str) -> str | None:
        return self._source.tied(embedding, lm_head)


@pytest.mark.parametrize(("name", "tied"), [("one-kv-head", True), ("llama", False)])
def test_a_stage_reads_its_own_layers_and_only_the_ends_the_vocabulary(
    recorded: dict[str, Recorded], name: str, tied: bool
) -> None:
    known = recorded[name]
    layers = load_model_config(known.model).num_layers
    pp = (1, layers - 2, 1)
    for stage, first in enumerate((0, 1, layers - 1)):
        source = _Counting(CheckpointWeights(known.model))
        DecoderModel(build(known, RankPlace(pp_rank=stage, pp_size=3), source, pp))
        numbers = {int(n.split(".")[2]) for n in source.names if n.startswith("model.layers.")}
        assert numbers == set(range(first, first + pp[stage]))
        assert ("model.embed_tokens.weight" in source.names) == (stage == 0 or (stage == 2 and tied))
        assert ("lm_head.weight" in source.names) == (stage == 2 and not tied)
        assert ("model.norm.weight" in source.names) == (stage == 2)
        assert len(source.names) == len(set(source.names))


def test_a_layout_that_the_model_cannot_have_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model = make_tiny("llama-linear", tmp_path / "model")
    config = load_model_config(model)
    mesh = Mesh(RankPlace(tp_size=2))
    arguments: dict[str, Any] = {"dtype": "float32", "load_format": "auto", "seed": 0, "small_batches": True}
    with pytest.raises(ConfigError, match=r"3 KV heads; sizes that would work: \[1, 3, 6\]"):
        load_model(tmp_path / "nowhere", config, **arguments, mesh=mesh)
    with pytest.raises(ConfigError, match="does not have 1 stages"):
        load_model(tmp_path / "nowhere", config, **arguments, pp_layers=(1, 2))


_LOAD = """
import gc, sys, time, torch
from dataclasses import replace
from pathlib import Path
from common.model.config import load_model_config
from common.model.loader import load_model
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace
path, tp = Path(sys.argv[1]), int(sys.argv[2])
mesh = Mesh(RankPlace(tp_rank=tp - 1, tp_size=tp))
config = load_model_config(path)
def load(config, kind):
    return load_model(path, config, dtype="float32", load_format=kind, seed=0, small_batches=True, mesh=mesh)
# What a first load allocates once: libraries, arenas.
load(replace(config, layers=config.layers[:1], vocab_size=64), "dummy")
gc.collect()  # a model and its adapters refer to each other
print("ready", flush=True)
sys.stdin.readline()
model = load(config, "auto")
time.sleep(0.5)  # on a busy machine, a look from outside may miss memory that is there for a moment only
"""


def _peak_growth(model: Path, tp: int) -> int:
    """Bytes of private memory by which a process grows while it loads its share, at the most.

    Watched from outside, in a loop: the process's own threads could not look while it is inside an operation.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(model), str(tp)],
        # What is freed goes back at once: this is about what loading asks for.
        env={**environment, "MALLOC_MMAP_THRESHOLD_": "131072"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        before = peak = _private_bytes(process.pid)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, _private_bytes(process.pid))
    assert process.returncode == 0
    return peak - before


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def test_loading_never_needs_more_than_the_share_and_the_largest_tensor(tmp_path: Path) -> None:
    shape: dict[str, Any] = {**_ONE_KV_HEAD, "hidden_size": 512, "vocab_size": 40_000, "intermediate_size": 8192}
    shape |= {"num_hidden_layers": 2, "tie_word_embeddings": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(oracle.TINY, "large", Tiny(LlamaConfig(**shape), max_shard_size="60MB"))
        model = make_tiny("large", tmp_path / "large")
    sizes = [tensor.numel() * 4 for file in model.glob("*.safetensors") for tensor in load_file(file).values()]
    share, largest, slack = sum(sizes) // 4, max(sizes), 8 * 2**20
    grown, whole = _peak_growth(model, 4), _peak_growth(model, 1)
    print(
        f"grew by {grown / 1e6:.0f} MB; share {share / 1e6:.0f}, largest {largest / 1e6:.0f}, one rank {whole / 1e6:.0f}"
    )
    assert share - slack < grown < share + largest + slack
    assert sum(sizes) - slack < whole < sum(sizes) + largest + slack
