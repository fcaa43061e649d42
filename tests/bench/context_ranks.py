"""The two ranks of `bench.context_parallel`: one model, spread over them in several ways by turns. Forked processes."""

from __future__ import annotations

import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.attention.choose import choose_attention
from common.attention.grouped import attention_of_groups
from common.attention.striped import StripedAttention, TorchPartialAttention
from common.base.hashing import BLOCK_SIZE
from common.control.messages import SamplingParams
from common.engine.runner import ModelRunner
from common.engine.step import SampleSpec, StepInput
from common.kv.rank_layout import KVLayout, blocks_for
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.parallel.connect import connect_mesh
from common.parallel.mesh import SOLO, Mesh
from common.parallel.place import RankPlace

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Way:
    """How the model is spread over the processes: over one, which computes with `threads`, or over both."""

    tp: int = 1
    cp: int = 1
    threads: int = 1
    gathers: bool = False
    """Whether PyTorch attends to gathered blocks, instead of the native kernels to the blocks."""


WAYS = {
    "one rank": Way(),
    "one rank, two threads": Way(threads=2),
    "tp 2": Way(tp=2),
    "cp 2": Way(cp=2),
    "cp 2, gathered blocks": Way(cp=2, gathers=True),
}


def measure(
    place: RankPlace,
    port: int,
    listener: socket.socket | None,
    *,
    folder: str,
    ports: list[int],
    context: int,
    prompt: int,
    chunk: int,
    steps: int,
    rounds: int,
) -> dict[str, dict[str, list[float]]]:
    """For each way, by turns, seconds of a decode step of one sequence with `context` tokens of KV (the median of `steps`), and of
    a prompt, also of this process's processor time, which says something where ranks wait for a busy core. `ports`: free ones, for the ways of two ranks."""
    meeting = _connect(place, port, listener)
    free = iter(ports)
    runners = {
        name: _make_runner(way, place.rank, folder, max(context + 1, prompt), free) for name, way in WAYS.items()
    }
    kinds = ("decode", "prefill", "prefill, processor")
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in WAYS}
    for number in range(rounds):
        for name, runner in runners.items():
            meeting.agree(f"{number} {name}", "now")
            if runner is not None:
                runner.execute(_step(context, 1))
                times = [_seconds(runner, [_step(context + 1, 1)]) for _ in range(steps)]
                found[name]["decode"].append(sorted(times)[len(times) // 2])
                chunks = [_step(at + chunk, chunk) for at in range(0, prompt, chunk)]
                busy_s = time.process_time()
                found[name]["prefill"].append(_seconds(runner, chunks))
                found[name]["prefill, processor"].append(time.process_time() - busy_s)
    meeting.agree("end", "now")
    meeting.close()
    return found


def _connect(place: RankPlace, port: int, listener: socket.socket | None) -> Mesh:
    return connect_mesh(
        place,
        master_address=_LOOPBACK,
        master_port=port,
        interface=_LOOPBACK,
        timeout_s=120.0,
        same_host=True,
        listener=listener,
    )


def _make_runner(way: Way, rank: int, folder: str, tokens: int, ports: Any) -> ModelRunner | None:
    """None on a process that has no part in it."""
    torch.set_num_threads(way.threads)
    size = way.tp * way.cp
    if size == 1 and rank:
        return None
    mesh = SOLO if size == 1 else _connect(RankPlace.of(rank, way.tp, 1, way.cp), next(ports), None)
    config = load_model_config(Path(folder))
    model = load_model(
        Path(folder), config, dtype="bfloat16", load_format="dummy", seed=0, small_batches=True, mesh=mesh
    )
    layout = KVLayout("f", kv_spec(config, "bfloat16"), tp_size=way.tp, cp_size=way.cp)
    place = mesh.place
    shard = layout.shard(place.tp_rank, 0, place.cp_rank)
    storage = KVStorage(layout, shard, blocks_for(blocks_for(tokens, BLOCK_SIZE) + 1, way.cp))
    for group in storage.groups:
        group.stacked.normal_(generator=torch.Generator().manual_seed(1))
    shapes = model.attention_shapes(BLOCK_SIZE)
    if not way.gathers:
        return ModelRunner(model, storage, choose_attention(storage, shapes, mesh))
    attention = attention_of_groups(
        storage, shapes, lambda kv, shape: StripedAttention(kv, shape, mesh, TorchPartialAttention)
    )
    return ModelRunner(model, storage, attention)


def _step(context: int, rows: int) -> StepInput:
    """The last rows of a context that is in blocks 0, 1, 2, ...; the last token is drawn."""
    draw = random.Random(rows)
    positions = list(range(context - rows, context))
    sample = SampleSpec(0, rows - 1, SamplingParams(0, 2, temperature=0.0), context, 0)
    table = list(range(blocks_for(context, BLOCK_SIZE)))
    tokens = [draw.randrange(3, 8000) for _ in positions]
    return StepInput(1, tokens, positions, [positions], [rows], [context], [[table]], int(rows == 1), [sample])


def _seconds(runner: ModelRunner, steps: list[StepInput]) -> float:
    started = time.perf_counter()
    for step in steps:
        runner.execute(step)
    return time.perf_counter() - started
