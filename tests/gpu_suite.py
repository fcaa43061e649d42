"""What the tests of a card share. GPU_SUITE_DEVICE=cpu runs those that can on a processor: that proves their own code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runner_cases import NUM_BLOCKS

from common.config import DecodeConfig
from common.engine.runner import ModelRunner
from common.node.loaded import load_rank
from common.node.startup import plan_node
from common.parallel.mesh import SOLO

DEVICE: Any = os.environ.get("GPU_SUITE_DEVICE", "cuda")
IS_CARD = DEVICE != "cpu"


def make_runner(model: Path, **options: Any) -> ModelRunner:
    """The runner of a decode node with `options`, its steps recorded as a node records them."""
    options = {"kv_blocks": NUM_BLOCKS, "max_num_seqs": 8, "max_num_batched_tokens": 2048, **options}
    config = DecodeConfig(model=str(model), device=DEVICE, **options)
    loaded = load_rank(plan_node(config), config, SOLO, small_batches=True)
    loaded.lay_out(NUM_BLOCKS)
    loaded.record()
    return loaded.runner
