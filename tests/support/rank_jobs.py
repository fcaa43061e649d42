"""Jobs for the ranks of `rank_processes`: exchanges on a mesh, and replays of recorded steps on a shard of a model."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from support.lora_files import load_adapters
from support.recording import Recording

from common.attention.choose import choose_attention
from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.base.errors import RankLost
from common.config.option_groups import ModelImpl
from common.engine.runner import ModelRunner
from common.kv.rank_layout import KVLayout
from common.model.choose import choose_model
from common.model.config import load_model_config
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.parallel.connect import connect_mesh
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace
from common.parallel.stage_tensors import StageTensor

BLOCK = 16
LOOPBACK = "127.0.0.1"
X = StageTensor("x", (64,), torch.float32)
WIDE = (StageTensor("x", (1024,), torch.float32),)


def connect(
    place: RankPlace, port: int, listener: socket.socket | None, same_host: bool, timeout_s: float = 30.0
) -> Mesh:
    return connect_mesh(
        place,
        master_address=LOOPBACK,
        master_port=port,
        interface=LOOPBACK,
        timeout_s=timeout_s,
        same_host=same_host,
        listener=listener,
    )


# All-reduces, gathers, hidden states


def exchange(place: RankPlace, port: int, listener: socket.socket | None, *, same_host: bool) -> dict[str, Any]:
    """All-reduces and gathers of many sizes against a single process's results; also the addresses it listens on,
    meanwhile and afterwards."""
    torch.set_num_threads(1)
    mesh = connect(place, port, listener, same_host)
    kind = type(mesh.group).__name__
    listens = sorted({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN})
    with torch.inference_mode():
        bits = [_sum(mesh, dtype, numel) for dtype in (torch.float32, torch.bfloat16) for numel in SIZES]
        for rows, columns in ((1, 3), (5, 70_000), (3, 600_000)):
            _gather(mesh, rows, columns)
            stripes = mesh.gather_stripes(torch.full((rows, columns), float(place.rank)))
            assert stripes.shape == (place.cp_size, rows, columns)
            assert [stripe.unique().tolist() for stripe in stripes] == [[rank] for rank in place.cp_peers]
            _share_rows(mesh, rows, min(columns, 70_000))
        _exchange_bytes(mesh)
    mesh.close()
    del mesh
    left = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {"kind": kind, "listens": listens, "bits": bits, "left": left}


SIZES = (1, 896, 5000, 16 * 1024 + 1, 64 * 1024, 300_001, 1_200_003)


def _values(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel % 997)).to(dtype)


def _sum(mesh: Mesh, dtype: torch.dtype, numel: int) -> int:
    """A hash of all bits of the sum, to compare among ranks."""
    x = _values(mesh.place.rank, dtype, numel)
    expected = torch.stack([_values(r, dtype, numel).float() for r in mesh.place.tp_peers]).sum(0)
    assert mesh.all_reduce(x) is x
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(x.float(), expected, atol=tolerance, rtol=tolerance)
    words = x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).long()
    return int((words * (torch.arange(numel) % 8191 + 1)).sum())


def _exchange_bytes(mesh: Mesh) -> None:
    """All-to-all with sizes from none to more than a slot of shared memory, and a broadcast as large."""
    me, size = mesh.place.tp_rank, mesh.place.tp_size
    sizes = [[(a * 7 + b * 3) % 4 * 700_001 + a for b in range(size)] for a in range(size)]
    sent = [torch.full((sizes[me][b],), 16 * me + b, dtype=torch.uint8) for b in range(size)]
    received = mesh.all_to_all(torch.cat(sent), sizes)
    expected = [torch.full((sizes[a][me],), 16 * a + me, dtype=torch.uint8) for a in range(size)]
    assert torch.equal(received, torch.cat(expected))
    x = torch.arange(2_500_000).remainder(251).to(torch.uint8)
    mesh.broadcast(own := x.clone() if me == 0 else torch.zeros_like(x))
    assert torch.equal(own, x)


def _share_rows(mesh: Mesh, rows: int, columns: int) -> None:
    """Each context-parallel rank has some rows, one of them perhaps none."""
    ranks, me = mesh.place.cp_size, mesh.place.cp_rank
    bounds = [rows * i // ranks for i in range(ranks + 1)]
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, 1, columns)
    assert torch.equal(mesh.gather_rows(whole[bounds[me] : bounds[me + 1]], bounds), whole)
    got = mesh.exchange_rows(whole + me, bounds)
    assert torch.equal(got, torch.stack([whole[bounds[me] : bounds[me + 1]] + rank for rank in range(ranks)]))


def _gather(mesh: Mesh, rows: int, columns: int) -> None:
    tp = mesh.place.tp_rank
    out = mesh.gather_columns(torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + tp)
    if tp != 0:
        assert out is None
        return
    assert out is not None
    assert out.shape == (rows, columns * mesh.place.tp_size)
    base = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    assert torch.equal(out, torch.cat([base + other for other in range(mesh.place.tp_size)], 1))


def pipe(place: RankPlace, port: int, listener: socket.socket | None, *, messages: int) -> float:
    """Every stage adds one to each of many messages of changing size; returns how long the first stage was busy.

    The last stage starts late: nobody before it may have to wait for that as long as its sends are few.
    """
    mesh = connect(place, port, listener, same_host=True)
    mesh.agree("start", "now")
    started = time.monotonic()
    for i in range(messages):
        rows = 1 + 97 * (i % 5)
        # An odd number of bytes before the second tensor: it must be aligned.
        schema = (StageTensor("flags", (), torch.bool), X) if rows % 2 else (X,)
        flags, x = torch.arange(rows) % 2 == 0, torch.full((rows, 64), float(i))
        got = {"flags": flags, "x": x} if place.is_first_stage else mesh.recv_stage(rows, schema)
        assert torch.equal(got["x"], x + place.pp_rank)
        assert torch.equal(got.get("flags", flags), flags)
        if not place.is_last_stage:
            mesh.send_stage({"x": got["x"] + 1, "flags": flags}, schema)
    busy_s = time.monotonic() - started
    mesh.agree("end", "now")
    mesh.close()
    return busy_s


def sends_do_not_wait(place: RankPlace, port: int, listener: socket.socket | None) -> list[float]:
    """The first stage sends one message per stage before the second receives any; blocking sends would deadlock here."""
    mesh = connect(place, port, listener, same_host=True)
    got: list[float] = []
    if place.is_first_stage:
        for i in range(place.pp_size):
            mesh.send_stage({"x": torch.full((512, 1024), float(i))}, WIDE)
        mesh.agree("sent", "all")
    else:
        mesh.agree("sent", "all")
        got = [mesh.recv_stage(512, WIDE)["x"][0, 0].item() for _ in range(place.pp_size)]
    mesh.agree("received", "all")
    mesh.close()
    return got


# Failures


def lose_a_rank(
    place: RankPlace,
    port: int,
    listener: socket.socket | None,
    *,
    lost: int,
    how: int,
    same_host: bool,
    timeout_s: float,
) -> str:
    """All ranks all-reduce and pass messages on until rank `lost` sends itself the signal `how`."""
    mesh = connect(place, port, listener, same_host, timeout_s)
    x = torch.ones(1, 64)
    started = time.monotonic()
    try:
        for i in range(10**6):
            started = time.monotonic()
            if place.rank == lost and i == 20:
                os.kill(os.getpid(), how)
            mesh.all_reduce(x.fill_(1.0))
            if not place.is_first_stage:
                mesh.recv_stage(1, (X,))
            if not place.is_last_stage:
                mesh.send_stage({"x": torch.ones(1, 64)}, (X,))
    except RankLost as error:
        assert time.monotonic() - started < 2 * timeout_s
        return str(error)
    finally:
        mesh.close()
    return "nothing happened"


def meet(place: RankPlace, port: int, listener: socket.socket | None, *, same_host: bool, timeout_s: float) -> None:
    connect(place, port, listener, same_host, timeout_s).close()


def disagree(place: RankPlace, port: int, listener: socket.socket | None) -> None:
    """The other ranks are configured with a different node size than the first rank."""
    other = RankPlace(place.tp_rank, place.tp_size + place.rank, place.pp_rank, place.pp_size)
    connect(other, port, listener, same_host=True, timeout_s=2.0).close()


# Models


def replay(
    place: RankPlace,
    port: int,
    listener: socket.socket | None,
    *,
    model: str,
    recording: str,
    pp_layers: list[int],
    same_host: bool,
    model_impl: ModelImpl = "native",
    adapters: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a recording's steps on this rank's shard of the model, as fast as the stages allow. `adapters`: folders of LoRA
    adapters, which the steps name by 1, 2, ...

    Returns the drawn tokens and their log-probabilities, and how far the KV is from the recorded slice.
    """
    torch.set_num_threads(1)
    recorded: Recording = pickle.loads(Path(recording).read_bytes())
    mesh = connect(place, port, listener, same_host)
    config = choose_model(Path(model), model_impl)
    pp = tuple(pp_layers)
    layout = KVLayout("f", kv_spec(config, "float32"), tp_size=place.tp_size, pp_layers=pp, cp_size=place.cp_size)
    storage = recorded.storage_for(layout, place.tp_rank, place.pp_rank, place.cp_rank)
    for group in storage.groups:
        group.stacked.fill_(1e4)
    share = load_model(
        Path(model), config, dtype="float32", load_format="auto", seed=0, small_batches=True, mesh=mesh, pp_layers=pp
    )
    load_adapters(share, adapters)
    shapes, several = share.attention_shapes(BLOCK), place.cp_size > 1
    attention = (
        choose_attention(storage, shapes, mesh) if several else attention_of_groups(storage, shapes, CpuAttention)
    )
    runner = ModelRunner(share, storage, attention)
    announced: list[int] = []
    steps = recorded.steps_in_stripes(place.cp_size, BLOCK)
    outputs = [runner.execute(step, announced.append) for step in steps]
    assert announced == list(range(storage.shard.layer_hi - storage.shard.layer_lo)) * len(recorded.steps)
    mesh.agree("replayed", "all")
    mesh.close()
    drawn = [token for output in outputs for token in output.sampled]
    return {
        "tokens": [token.token_id for token in drawn],
        "logprobs": [token.logprobs.logprob for token in drawn if token.logprobs],
        "prompt_logprobs": [[each[:-1] for each in found] for output in outputs for found in output.prompt_logprobs],
        "kv_error": recorded.kv_error(storage),
    }


def lose_a_rank_in_a_step(
    place: RankPlace, port: int, listener: socket.socket | None, *, model: str, recording: str, lost: int
) -> str:
    """Replay the steps while rank `lost` is killed after a few of them; returns what the runner raised on the others."""
    mesh = connect(place, port, listener, True, 5.0)
    config = load_model_config(Path(model))
    recorded: Recording = pickle.loads(Path(recording).read_bytes())
    layout = KVLayout("f", kv_spec(config, "float32"), tp_size=place.tp_size)
    storage = recorded.storage_for(layout, place.tp_rank, 0)
    share = load_model(Path(model), config, dtype="float32", load_format="auto", seed=0, small_batches=True, mesh=mesh)
    runner = ModelRunner(share, storage, attention_of_groups(storage, share.attention_shapes(BLOCK), CpuAttention))
    try:
        for i, step in enumerate(recorded.steps):
            if i == 3 and place.rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            runner.execute(step)
    except RankLost as error:
        return str(error)
    finally:
        mesh.close()
    return "nothing happened"
