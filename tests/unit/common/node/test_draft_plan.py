"""A draft model is planned beside its target, or refused in one sentence before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.model.hub import DEMO_MODEL_PATH
from common.node.kv_budget import KvMemoryRequest
from common.node.plan import NodePlan
from common.node.worker import load_worker
from common.parallel.mesh import SOLO
from decode_node.role import ROLE


def plan(draft: str, **options: object) -> NodePlan:
    config = {"model": "demo", "dtype": "float32", "speculate": f"draft:{draft}", **options}
    return ROLE.plan(DecodeConfig(**config))  # type: ignore[arg-type]


def test_the_draft_is_whole_on_the_leader_whatever_the_targets_ranks(tmp_path: Path) -> None:
    target = plan("demo", tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_dtype="fp8", max_model_len=500)
    draft = target.draft
    assert draft is not None
    assert (draft.layout.world_size, draft.layout.spec.dtype, draft.model.max_model_len) == (1, "float32", 500)
    windowed = make_tiny("gemma3", tmp_path / "windowed")
    other = ROLE.plan(DecodeConfig(model=str(windowed), dtype="float32", speculate=f"draft:{windowed}"))
    assert other.draft is not None
    assert (other.layout.spec.num_tables, other.draft.layout.spec.num_tables) == (3, 1)


def test_a_missing_or_other_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the draft model: model directory /nowhere does not exist$"):
        plan("/nowhere")
    with pytest.raises(ConfigError, match=r"^the draft model has a vocabulary of \d+ tokens, and the model has 2048$"):
        plan(str(make_tiny("qwen3", tmp_path / "other")))
    swapped = tmp_path / "swapped"
    shutil.copytree(DEMO_MODEL_PATH, swapped)
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = [token for token, number in vocab.items() if number in (100, 101)]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"^the draft model has another vocabulary: token .* is 10\d in the model and"
    ):
        plan(str(swapped))
    (swapped / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="missing or malformed"):
        plan(str(swapped))


def test_kv_memory_is_shared_with_the_draft() -> None:
    """The demo model as its own draft: half of the memory each."""
    target = plan("demo", kv_memory_gb=0.05)
    both = load_worker(target, SOLO, small_batches=True)
    alone = load_worker(
        ROLE.plan(DecodeConfig(model="demo", dtype="float32", kv_memory_gb=0.05)), SOLO, small_batches=True
    )
    assert both.max_blocks == alone.max_blocks // 2
    both.allocate_kv(both.max_blocks)
    assert both.draft is not None
    assert both.draft.num_blocks == both.num_blocks
    assert target.kv_memory == KvMemoryRequest(target.kv_memory.utilization, int(0.05 * 2**30))
    both.close()
    alone.close()
