"""What `kvrelay up` is to run, and what to do when something of it dies. Pure: no processes, no clock."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from common.config.options import DecodeConfig, PrefillConfig, RouterConfig, ServiceConfig, UpConfig, field_infos
from common.config.sources import ENV_PREFIX, Source
from common.tools.up.gpus import VISIBLE, NodeGpus, share_gpus
from common.tools.up.routers import ADMIN_HOST, RouterPlace

ServiceRole = Literal["redis", "router", "prefill", "decode"]
STOP_ORDER: tuple[ServiceRole, ...] = ("router", "prefill", "decode", "redis")
"""Clients first, so that nobody sees a node vanish below it; what everybody needs last."""

_YIELDING_NICE = 10
"""Niceness of the side that `favor` does not favor; under contention it still keeps most of its throughput."""


@dataclass(frozen=True)
class ChildSpec:
    """One process to run; the same at every restart."""

    name: str
    role: ServiceRole
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to ours; carries what must not be seen in a process list."""
    node_id: str | None = None
    """By which it is found in the membership."""
    url: str = ""
    """At which a router is asked for its health."""
    quiet: bool = False
    """Its output is shown only when it ends unasked."""


def plan_children(
    config: UpConfig,
    sources: Mapping[str, Source],
    *,
    redis_url: str,
    routers: list[RouterPlace],
    own_redis: tuple[str, ...] | None,
    host_name: str,
    admin_token: str,
    gpus: list[str],
) -> list[ChildSpec]:
    """The children in order of start. `own_redis` is the command of a Redis to run, None for a foreign one; `gpus`
    are the CUDA gpus that the nodes may use, which are shared among them.

    All services get `admin_token`.

    A field of `config` that a service has too is passed on only if it was set by a flag, by the environment or in
    the [up] table: what stands elsewhere in a file reaches the service through the file itself.
    """
    children: list[ChildSpec] = []
    if own_redis is not None:
        children.append(ChildSpec("redis", "redis", own_redis, quiet=True))
    for place in routers:
        router = {"host": config.host, "port": str(place.port), "redis_url": redis_url, "cluster": config.cluster}
        router |= {"admin_token": admin_token, "admin_port": str(place.admin_port), "admin_host": ADMIN_HOST}
        spec = _service(place.name, RouterConfig, config, sources, router, None)
        children.append(replace(spec, url=place.url))
    ranks = [config.prefill_tp] * config.prefill + [config.decode_tp * config.decode_pp] * config.decode
    shares = iter(share_gpus(gpus if config.device != "cpu" else [], ranks))
    for role, cls, count in (("prefill", PrefillConfig, config.prefill), ("decode", DecodeConfig, config.decode)):
        for index in range(count):
            name = f"{role}-{index}"
            own = {"model": config.model, "redis_url": redis_url, "cluster": config.cluster}
            # In a Redis that others use too, plain names would collide with those of another `kvrelay up`.
            node_id = name if own_redis is not None else f"{name}-{host_name}-{routers[0].port}"
            own |= {"node_id": node_id, "host": "127.0.0.1", "port": "0", "data_port": "0"}
            own |= {"admin_token": admin_token, "admin_port": "0", "admin_host": ADMIN_HOST}
            share = next(shares)
            own |= _ranks(role, config) | _utilization(role, config, share)
            if yields(config.favor) == role:
                own["nice"] = str(_YIELDING_NICE)
            if config.start_timeout_s > cls.start_timeout_s:  # a node must not give up before everything does
                own["start_timeout_s"] = str(config.start_timeout_s)
            node = _service(name, cls, config, sources, own, node_id)
            if share is not None:
                node = replace(node, environ={**node.environ, VISIBLE: ",".join(share.visible)})
            children.append(node)
    return children


def _ranks(role: str, config: UpConfig) -> dict[str, str]:
    """How many ranks each node of `role` gets. Also where it is one: gpus and memory were counted by these figures."""
    if role == "prefill":
        return {"tensor_parallel_size": str(config.prefill_tp)}
    return {
        "tensor_parallel_size": str(config.decode_tp),
        "pipeline_parallel_size": str(config.decode_pp),
        "pp_layers": config.decode_pp_layers,
    }


def _utilization(role: str, config: UpConfig, share: NodeGpus | None) -> dict[str, str]:
    """What a node of `role` may take of its gpus, where there are any or somebody said it."""
    stated = config.prefill_gpu_memory_utilization if role == "prefill" else config.decode_gpu_memory_utilization
    if stated is None and share is not None:
        stated = share.utilization
    return {} if stated is None else {"gpu_memory_utilization": str(stated)}


def yields(favor: str) -> str | None:
    """The role that stands back on the processor."""
    return {"itl": "prefill", "ttft": "decode"}.get(favor)


def _service(
    name: str,
    cls: type[ServiceConfig],
    config: UpConfig,
    sources: Mapping[str, Source],
    own: dict[str, str],
    node_id: str | None,
) -> ChildSpec:
    infos = field_infos(cls)
    options = {
        key: str(getattr(config, key))
        for key, source in sources.items()
        if key in infos and not infos[key].own and source not in ("default", "file")
    }
    if cls is RouterConfig:
        # The router takes the model from what its nodes report, which is where they really found it; not from a file or
        # a variable that names another.
        options["model"] = "none"
    options |= own
    argv = [sys.executable, "-m", "common.cli", cls.section]
    environ: dict[str, str] = {}
    for key, value in options.items():
        if infos[key].secret:
            environ[ENV_PREFIX + key.upper()] = value
        else:
            argv += ["--" + key.replace("_", "-"), value]
    return ChildSpec(name, _role(cls), tuple(argv), environ, node_id)


def _role(cls: type[ServiceConfig]) -> ServiceRole:
    roles: dict[type[ServiceConfig], ServiceRole] = {
        RouterConfig: "router",
        PrefillConfig: "prefill",
        DecodeConfig: "decode",
    }
    return roles[cls]
