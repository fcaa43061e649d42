"""A decode step over latents: what a long context adds to it, and what reading its rows takes of the memory's rate."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from bench.results import Result, Target, median
from bench.session import Session
from bench.worker import PASSIVE, Worker

_BATCH, _SHORT, _LONG, _LAYERS = 8, 128, 4096, 4
_LATENT, _ROPE = 512, 64
_MOST = 1.5
_CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": _LAYERS,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "topk_method": "greedy",
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": _LATENT,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": _ROPE,
    "v_head_dim": 128,
    "vocab_size": 102_400,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "torch_dtype": "bfloat16",
    "bos_token_id": 100_000,
    "eos_token_id": 100_001,
}
"""DeepSeek-V2-Lite, with fewer layers."""


def run(session: Session) -> Result:
    """Steps of 8 sequences with short and with long contexts, in alternating rounds."""
    result = Result("latents")
    session.stop_system()
    session.stop_plain()
    rounds, steps = session.repeats(7, 2), session.repeats(10, 3)
    times: dict[int, list[float]] = {_SHORT: [], _LONG: []}
    reads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        with contextlib.closing(Worker("bench.plain:Plain", environ=PASSIVE, folder=folder)) as plain:
            for _ in range(rounds + 1):
                reads.append(session.limits.measure_read())
                for context, found in times.items():
                    found.append(plain.call("decode", batch=_BATCH, context=context, steps=steps)["median_step_s"])
    short, long = (found[1:] for found in times.values())  # the first round of each is its warm-up
    result.add(
        f"step of {_BATCH} x {_LONG} tokens against {_SHORT}",
        median([a / b for a, b in zip(long, short, strict=True)]),
        "x",
        target=Target(_MOST, at_most=True),
        note=f"{1e3 * median(short):.1f} ms and {1e3 * median(long):.1f} ms",
    )
    size = _BATCH * (_LONG - _SHORT) * _LAYERS * (_LATENT + _ROPE) * 2
    added = median([a - b for a, b in zip(long, short, strict=True)])
    result.add(
        "rows of the longer contexts",
        size / added / 1e9,
        "GB/s",
        limit=max(reads) / 1e9,
        limit_name="read bandwidth",
    )
    result.details = {"short": short, "long": long, "reads": reads}
    return result
