"""Shared parts of the GPU tests. GPU_SUITE_DEVICE=cpu runs those that can on a CPU, which checks the tests' own code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.runner_cases import NUM_BLOCKS

from common.config.service_configs import DecodeConfig
from common.engine.runner import ModelRunner
from common.node.plan import plan_node
from common.node.worker import load_worker
from common.parallel.mesh import SOLO

DEVICE: Any = os.environ.get("GPU_SUITE_DEVICE", "cuda")
IS_GPU = DEVICE != "cpu"


def make_runner(model: Path, **options: Any) -> ModelRunner:
    """The runner of a decode node with `options`, with CUDA graphs captured as a node captures them."""
    options = {"kv_blocks": NUM_BLOCKS, "max_num_seqs": 8, "max_num_batched_tokens": 2048, **options}
    config = DecodeConfig(model=str(model), device=DEVICE, **options)
    worker = load_worker(plan_node(config), SOLO, small_batches=True)
    worker.allocate_kv(NUM_BLOCKS)
    worker.capture_graphs()
    return worker.runner


def sanitized(*tests: str) -> tuple[int, str]:
    """Run tests under compute-sanitizer. Returns its exit status (9: invalid memory access) and output.

    Failing CUDA API calls are not reported: libraries use them to probe the driver.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    assert sanitizer is not None, "this needs compute-sanitizer, a part of the CUDA toolkit"
    options = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
    command = [sanitizer, *options, sys.executable, "-m", "pytest", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.returncode, done.stdout + done.stderr
