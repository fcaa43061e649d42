"""A batch of sequences with different adapters gives the tokens of models into which each was merged."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lora_files import merge, write_adapter
from support.oracle import first_difference, greedy, make_tiny

from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.runner import ModelRunner
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.model.lora.checkpoint import open_adapter

NUM_BLOCKS, NUM_TOKENS = 96, 12
PROMPT = [7 + 5 * i % 190 for i in range(21)]


def load(path: Path) -> DecoderModel:
    return load_model(path, load_model_config(path), dtype="float32", load_format="auto", seed=0, small_batches=True)


def generate(path: Path, model: DecoderModel, adapter_ids: list[int]) -> list[list[int]]:
    """Greedy tokens after `PROMPT` for each adapter, all in one batch, the prompts computed in chunks of 8."""
    config = model.config
    layout = KVLayout("f", kv_spec(config, "float32"))
    storage = KVStorage(layout, layout.shard(0, 0), NUM_BLOCKS)
    runner = ModelRunner(model, storage, attention_of_groups(storage, model.attention_shapes(16), CpuAttention))
    scheduler = Scheduler(SchedulerConfig(128, 16, 64, 8), BlockPool(NUM_BLOCKS))
    seqs: list[Sequence] = []
    for n, adapter_id in enumerate(adapter_ids):
        request = EngineRequest(pack_ids(PROMPT), SamplingParams(seed=n, max_tokens=NUM_TOKENS, temperature=0.0))
        seqs.append(Sequence(AttemptKey(str(n), 1), request, list(PROMPT), root_hash(f"adapter {adapter_id}"), 0.0))
        seqs[-1].adapter_id = adapter_id
        scheduler.add(seqs[-1])
    while (plan := scheduler.schedule()) is not None:
        scheduler.update(plan, runner.execute(plan.step).sampled)
    return [seq.tokens.ids[len(PROMPT) :] for seq in seqs]


def expect_tokens(merged: Path, tokens: list[int]) -> None:
    assert first_difference(greedy(merged, PROMPT, NUM_TOKENS), tokens) is None


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2", "opt", "glm4-moe", "qwen3-moe"])
def test_eight_adapters_in_one_batch_give_the_tokens_of_merged_models(name: str, tmp_path: Path) -> None:
    path = make_tiny(name, tmp_path / "model")
    model = load(path)
    ids = list(range(1, 9)) if name == "qwen2" else [1, 2]
    for adapter_id in ids:
        folder = write_adapter(tmp_path / f"a{adapter_id}", path, rank=2 * adapter_id, seed=adapter_id)
        checkpoint = open_adapter(folder, model.config)
        model.adapters.load(adapter_id, checkpoint, checkpoint.digest(checkpoint.read()))
    answers = generate(path, model, [0, *ids, 0, ids[1]])
    expect_tokens(path, answers[0])
    assert answers[-2] == answers[0]
    assert answers[-1] == answers[2]
    for adapter_id in ids:
        expect_tokens(merge(path, tmp_path / f"a{adapter_id}", tmp_path / f"m{adapter_id}"), answers[adapter_id])
    assert len({tuple(answer) for answer in answers}) == len(ids) + 1
