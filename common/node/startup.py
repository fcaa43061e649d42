"""From a node's configuration to a loaded model, its KV memory and its scheduler: the same for both roles."""

from __future__ import annotations

import logging
import platform
import secrets
import time
from dataclasses import dataclass

from common.attention.base import AttentionShape
from common.attention.cpu import CpuAttention
from common.config import NodeConfig
from common.engine.runner import ModelRunner
from common.engine.scheduler import Scheduler, SchedulerConfig
from common.engine.step import SampleSpec, StepInput
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool
from common.kv.storage import KVStorage
from common.model.config import load_model_config, resolve_model
from common.model.fingerprint import fingerprint
from common.model.loader import load_model
from common.protocol import ModelInfo, NodeRecord, PeerRef, Role, SamplingParams
from common.torch_setup import configure_torch

log = logging.getLogger(__name__)

_RANK = 0


def node_id_for(role: Role, config: NodeConfig) -> str:
    """The configured node id, or one that no other node has."""
    return config.node_id or f"{role}-{platform.node()}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Engine:
    """All that one rank computes with, and what the node says about itself."""

    layout: KVLayout
    storage: KVStorage
    runner: ModelRunner
    scheduler: Scheduler
    model: ModelInfo

    def record(self, role: Role, me: PeerRef) -> NodeRecord:
        return NodeRecord(
            role=role,
            peer=me,
            model=self.model,
            layout=self.layout,
            kv_blocks_total=self.storage.num_blocks,
            started_at=time.time(),
        )


def build_engine(config: NodeConfig, *, prefill_chunk: int, small_batches: bool) -> Engine:
    """Load the model and lay out KV memory. Blocking, seconds to minutes.

    `small_batches`: whether steps of few rows matter here (a decode node), which may cost memory.
    Raises: ConfigError in one sentence for whatever is wrong with the model or the sizes.
    """
    configure_torch(config.threads)
    path = resolve_model(config.model)
    model_config = load_model_config(path)
    dtype = model_config.resolve_dtype(config.dtype)
    max_model_len = model_config.fit_context(config.max_model_len)
    layout = KVLayout(
        fingerprint=fingerprint(path, model_config, config.load_format, dtype, config.seed),
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=dtype,
    )
    num_blocks = config.kv_blocks or int(config.kv_memory_gb * 2**30) // layout.bytes_per_block
    if num_blocks < 2:
        raise ConfigError(f"{num_blocks} KV blocks of {layout.bytes_per_block} bytes: give the node more KV memory")
    model = load_model(
        path,
        model_config,
        dtype=dtype,
        load_format=config.load_format,
        seed=config.seed,
        small_batches=small_batches,
    )
    storage = KVStorage(layout, layout.shard(0, 0), num_blocks)
    shape = AttentionShape(
        num_q_heads=model_config.num_q_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=storage.data.dtype,
        block_size=layout.block_size,
    )
    runner = ModelRunner(model, storage, CpuAttention(storage, shape))
    runner.execute(_WARM_UP)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk=prefill_chunk,
        ),
        BlockPool(num_blocks),
    )
    log.info(
        "model %s, %s, %d KV blocks (%.2f GB, %d tokens)",
        config.model,
        dtype,
        num_blocks,
        num_blocks * layout.bytes_per_block / 1e9,
        num_blocks * layout.block_size,
    )
    name = config.served_model_name or (config.model if config.model == "demo" else path.name)
    return Engine(
        layout, storage, runner, scheduler, ModelInfo(name, str(path), model_config.vocab_size, max_model_len)
    )


_WARM_UP = StepInput(
    step_id=0,
    token_ids=[0],
    positions=[0],
    slot_mapping=[0],
    query_lens=[1],
    context_lens=[1],
    block_tables=[[0]],
    samples=[SampleSpec(0, SamplingParams(seed=0, max_tokens=1, temperature=0.0), position=1, num_generated=0)],
)
"""One row through every layer: the first touch of weights and memory is not some client's to wait for."""
