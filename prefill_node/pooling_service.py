"""Start-up of a node of a pooling model: config, weights, server. Importing this imports torch."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import torch

from common.base.clock import monotonic
from common.base.device import CPU
from common.base.process import run_service
from common.config.fields import listed
from common.config.service_configs import PrefillConfig
from common.control.identities import pack_ids
from common.control.messages import ModelInfo, NodeRecord
from common.control.pooling import PoolInput
from common.kernels.choose import describe_kernels
from common.kv.journal import BlockJournal
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.model.fingerprint import pooling_fingerprint, tokenizer_digest
from common.model.hub import model_name, resolve_model
from common.model.pooling.decoder_config import PoolingDecoderConfig
from common.model.pooling.encoder_config import EncoderConfig
from common.model.pooling.open import load_pooling_model, read_pooling_config
from common.model.pooling.pooler import Pooler, PoolingModel
from common.model.tokenizer_folder import tokenizer_folder
from common.node.admin import NodeAdmin
from common.node.server import NodeServer
from prefill_node.pooling_core import PoolingNode, PoolLimits

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024
_STEP_TOKENS = 4096
"""Most tokens of one step, unless configured: more make no step faster, and small requests wait longer."""


def run_pooling_node(config: PrefillConfig) -> None:
    """Run the node until SIGTERM or SIGINT.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed.
    """
    path = resolve_model(config.model)
    pooling_config = read_pooling_config(path, config.max_model_len)
    run_service(lambda: _serve(config, path, pooling_config))


async def _serve(config: PrefillConfig, path: Path, of_model: EncoderConfig | PoolingDecoderConfig) -> None:
    server = NodeServer(config)
    await server.bind()
    model = await asyncio.to_thread(_load, path, of_model, config)
    limits = PoolLimits(
        of_model.vocab_size, of_model.max_model_len, config.max_num_batched_tokens or _STEP_TOKENS, _MAX_ACCEPTED
    )
    core = PoolingNode(Pooler(model).compute, limits, server.send_buffer, monotonic)
    names = listed("served_model_name", config.served_model_name)
    digest = tokenizer_digest(tokenizer_folder(path, config.tokenizer))
    info = ModelInfo(
        names[0] if names else model_name(path),
        str(path),
        of_model.vocab_size,
        of_model.max_model_len,
        digest,
        of_model.task,
        of_model.hidden_size,
    )
    fingerprint = pooling_fingerprint(
        path, of_model, config.load_format, config.dtype, config.seed, config.quantization, digest
    )
    layout = KVLayout(fingerprint, KVSpec.uniform(1, 1, 1, "float32"))
    record = NodeRecord(
        "prefill",
        server.me,
        info,
        layout,
        0,
        time.time(),
        max_num_seqs=config.max_num_seqs,
        kernels=describe_kernels(CPU),
    )
    await server.run(
        core,
        record,
        BlockJournal(),
        on_ready=lambda: log.info(
            "pooling node %s ready at %s: %s (%s)", server.me.node_id, server.me.control_address, info.name, info.task
        ),
        routes=NodeAdmin(server, record).routes(),
    )


def _load(path: Path, of_model: EncoderConfig | PoolingDecoderConfig, config: PrefillConfig) -> PoolingModel:
    """The model, after one forward pass, so that no client waits for the first access to its weights."""
    model = load_pooling_model(path, of_model, config)
    torch.set_flush_denormal(True)
    model.hidden([PoolInput(pack_ids([0]))])
    return model
