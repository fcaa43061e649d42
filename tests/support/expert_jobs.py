"""Jobs for the ranks of `rank_processes`: a layer of 64 experts on four ranks, with rows that follow Zipf's law."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import torch
from support.rank_jobs import connect
from torch import Tensor

from common.base.errors import RankLost
from common.kernels.native.find import find_native
from common.kernels.native.kernels import NativeKernels
from common.kernels.torch_kernels import TORCH
from common.model.build import Build
from common.model.config import load_model_config
from common.model.description import MixtureDescription
from common.model.formats.on_the_fly import WeightBits
from common.model.mixture.exchange import spread_experts
from common.model.mixture.experts import Experts, make_experts
from common.model.mixture.moving import tensors_of
from common.model.mixture.placement import imbalance
from common.model.mixture.rebalancer import Rebalancer
from common.model.mixture.routing import Routing
from common.model.mixture.slots import ExpertSlots
from common.model.precision import FLOAT32
from common.model.weights import CheckpointWeights
from common.parallel.mesh import SOLO, Mesh
from common.parallel.place import RankPlace

EXPERTS, TOP_K, ROWS = 64, 4, 200


def layer_of(model: Path, mesh: Mesh, redundant: int | None, *, native: bool, bits: WeightBits | None) -> Experts:
    """This rank's experts of layer 0 of a model."""
    return make_experts(*_made_of(model, mesh, redundant, native=native, bits=bits))


def _made_of(
    model: Path, mesh: Mesh, redundant: int | None, *, native: bool, bits: WeightBits | None
) -> tuple[Build, str, MixtureDescription]:
    config = load_model_config(model)
    library = find_native() if native else None
    kernels = TORCH if library is None else NativeKernels(library)
    weights = CheckpointWeights(model, config.quantization)
    build = Build(config, weights, FLOAT32, mesh, kernels=kernels, quantize=bits, redundant_experts=redundant)
    mixture = config.layers[0].mlp
    assert isinstance(mixture, MixtureDescription)
    return build, "model.layers.0.", mixture


def zipf(rows: int, experts: int, seed: int) -> Routing:
    """Each row's experts, drawn by Zipf's law with exponent 1, so that the first rank has the most."""
    generator = torch.Generator().manual_seed(seed)
    chances = 1.0 / torch.arange(1, experts + 1)
    chosen = chances.expand(rows, experts).multinomial(TOP_K, generator=generator)
    return Routing(chosen, torch.rand(rows, TOP_K, generator=generator))


def rebalance(
    place: RankPlace,
    port: int,
    listener: socket.socket | None,
    *,
    model: str,
    redundant: int,
    native: bool,
    bits: WeightBits | None,
    same_host: bool,
    minutes: int,
    lost: int | None = None,
) -> dict[str, Any]:
    """Serve rows before, during and after a rebalancing, then `minutes` of steady load, with a turn every half second. Rank
    `lost` kills itself in the first move."""
    torch.set_num_threads(1)
    mesh = connect(place, port, listener, same_host, 10.0)
    whole = layer_of(Path(model), SOLO, None, native=native, bits=bits)
    part = layer_of(Path(model), mesh, redundant, native=native, bits=bits)
    slots = part.slots
    assert slots is not None
    now = [0.0]
    rebalancer = Rebalancer({0: slots}, mesh, 1.1, lambda: now[0])
    share, experts = _held_bytes(slots), slots.placement.num_experts
    first = slots.placement
    found: dict[str, Any] = {"error": 0.0, "moved": [], "loads": [], "share": [share, len(slots.own)]}
    if place.rank == lost:
        vars(mesh)["all_to_all"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def serve(seed: int) -> None:
        x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(seed))
        routing = zipf(ROWS, experts, seed)
        expected: Tensor = whole.forward(x, routing)
        out = mesh.all_reduce(part.forward(x, routing))
        found["error"] = max(found["error"], float((out - expected).abs().max() / expected.abs().max()))

    try:
        with torch.inference_mode():
            for seed in range(20 + 20 * minutes):
                serve(seed)
                if not found["moved"]:
                    found["before"] = imbalance(slots.rank_loads())
                before = slots.placement
                rebalancer.take_turn()
                if slots.placement != before:
                    found["moved"].append([now[0], len(before.moves_to(slots.placement))])
                now[0] += 3.0
        found["after"] = imbalance(slots.rank_loads())
    except RankLost as error:
        return {"lost": str(error)}
    finally:
        mesh.close()
    assert _held_bytes(slots) == share
    assert found["moved"] == [] or slots.placement != first
    found["slots"] = list(slots.placement.slots)
    report = rebalancer.report()
    found["plans"] = [plan.reason for plan in report.plans]
    return found


def dispatch(
    place: RankPlace,
    port: int,
    listener: socket.socket | None,
    *,
    model: str,
    redundant: int | None,
    native: bool,
    same_host: bool,
    rows: list[list[int]],
) -> dict[str, Any]:
    """Steps in which data-parallel ranks have rows of their own: `rows[step][rank]`. With `redundant` slots experts move between
    them."""
    torch.set_num_threads(1)
    mesh = connect(place, port, listener, same_host, 10.0)
    whole = layer_of(Path(model), SOLO, None, native=native, bits=None)
    build, prefix, mixture = _made_of(Path(model), mesh, redundant, native=native, bits=None)
    part = spread_experts(make_experts(build, prefix, mixture), build, mixture.router)
    now = [0.0]
    rebalancer = None if part.slots is None else Rebalancer({0: part.slots}, mesh, 1.1, lambda: now[0])
    found: dict[str, Any] = {"error": 0.0, "moved": 0}
    with torch.inference_mode():
        for step, counts in enumerate(rows):
            own, generator = counts[place.rank], torch.Generator().manual_seed(100 * step + place.rank)
            if not own:
                part.serve()
            else:
                x, shared = torch.randn(2, own, 64, generator=generator)
                routing = zipf(own, 64, 100 * step + place.rank)
                expected = whole.forward(x, routing) + shared
                error = (part.forward(x, routing, shared) - expected).abs().max() / expected.abs().max()
                found["error"] = max(found["error"], float(error))
            if rebalancer is not None and part.slots is not None:
                before = part.slots.placement
                rebalancer.take_turn()
                found["moved"] += part.slots.placement != before
                now[0] += 30.0
    mesh.close()
    if part.slots is not None:
        found["counts"], found["slots"] = part.slots.counts.tolist(), list(part.slots.placement.slots)
        found["bytes"], found["held"] = _held_bytes(part.slots), len(part.slots.own)
    return found


def _held_bytes(slots: ExpertSlots) -> int:
    """Bytes of this rank's experts."""
    return sum(tensor.nbytes for tensor in tensors_of(slots.linears))
