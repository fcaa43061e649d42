"""Plans which processes `kvrelay up` runs. Pure but for reading the configuration file of a child: no processes, no clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.base.errors import ConfigError
from common.base.process import module_command
from common.config.fields import field_infos
from common.config.option_groups import CPU_KV_GB
from common.config.pooling_options import OF_PROCESS
from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig, ServiceConfig, UpConfig
from common.config.sources import ENV_PREFIX, Resolved, Source, resolve
from kvrelay.up.gpus import VISIBLE, NodeGpus, share_gpus
from kvrelay.up.models import UpModel
from kvrelay.up.routers import ADMIN_HOST, RouterPlace

ServiceRole = Literal["redis", "router", "prefill", "decode", "pooling"]
"""Role `pooling`: a prefill node of a model that embeds or scores."""
STOP_ORDER: tuple[ServiceRole, ...] = ("router", "pooling", "prefill", "decode", "redis")
"""Clients before the services that they use: no service sees a node vanish, and Redis stops last."""

_FIRST_START_S = 1800.0
"""Limit of a first start on GPUs: kernels that are not precompiled are compiled then, which takes minutes."""
_ON_LOOPBACK = {"host": "127.0.0.1", "advertise_host": "none", "port": "0", "data_port": "0", "admin_port": "0"}
_ON_ONE_HOST = {"nnodes": "1", "node_rank": "0"}
_YIELDING_ROLE = {"itl": "prefill", "ttft": "decode"}
"""The role that gets less processor time, by what `favor` favors."""
_YIELDING_NICE = 5
"""Niceness of the role that `favor` does not favor: beside the other one it gets a quarter of the cores."""


@dataclass(frozen=True)
class ChildSpec:
    """One process to run; the same at every restart."""

    name: str
    role: ServiceRole
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the supervisor's environment; carries secrets, which must not appear in a process list."""
    node_id: str | None = None
    """Id in the membership; nodes only."""
    model_path: str = ""
    """Path of the model with which it generates; nodes only."""
    url: str = ""
    """URL of the API; routers only."""
    quiet: bool = False
    """Show its output only if it ends unexpectedly."""


def plan_children(
    config: UpConfig,
    sources: Mapping[str, Source],
    models: Sequence[UpModel],
    *,
    redis_url: str,
    routers: list[RouterPlace],
    own_redis: tuple[str, ...] | None,
    host_name: str,
    admin_token: str,
    gpus: list[str],
) -> list[ChildSpec]:
    """The children in start order.

    Each of `models` gets nodes of its own. `own_redis` is the command of the Redis server to run, None if an existing
    one is used. `gpus` are the CUDA GPUs to distribute over the nodes. All services get `admin_token`.

    An option of `config` that a service has too is passed on only if it was set by a flag, the environment or the [up]
    table: a value from elsewhere in a file reaches the service through the file itself.
    """
    children: list[ChildSpec] = []
    if own_redis is not None:
        children.append(ChildSpec("redis", "redis", own_redis, quiet=True))
    of_all = {"redis_url": redis_url, "cluster": config.cluster, "admin_token": admin_token, "admin_host": ADMIN_HOST}
    generating = [each for each in models if each.generates]
    preload = json.dumps([str(each.path) for each in generating])
    for place in routers:
        own = {**of_all, "host": config.host, "port": str(place.port), "admin_port": str(place.admin_port)}
        argv, environ = service_command(RouterConfig, config, sources, {**own, "preload": preload})
        children.append(ChildSpec(place.name, "router", argv, environ, url=place.url))
    ranks = [config.ranks_of("prefill")] * config.prefill + [config.ranks_of("decode")] * config.decode
    shares = iter(
        share_gpus(gpus if config.device != "cpu" else [], ranks * len(generating), config.gpu_memory_utilization)
    )
    numbers: Counter[ServiceRole] = Counter()
    for model in models:
        given = sources if model.generates else _of_pooling(sources, is_alone=not generating)
        path = str(model.path) if model.generates and not config.tokenizer else ""
        for role, cls, count in nodes_of(model, config):
            for _ in range(count):
                name = f"{role}-{numbers[role]}"
                numbers[role] += 1
                # In a shared Redis, plain names would collide with those of another `kvrelay up`.
                node_id = name if own_redis is not None else f"{name}-{host_name}-{routers[0].port}"
                share = next(shares) if model.generates else None
                own = {**of_all, **_ON_LOOPBACK, **_ON_ONE_HOST, "model": model.model, "node_id": node_id}
                if model.generates:
                    own |= _in_other_role(cls, config, given, share)
                if model.generates or not generating:
                    own |= role_options(cls.section, config, share)
                own |= _host_options(cls, config, on_gpus=share is not None)
                argv, environ = service_command(cls, config, given, own)
                if share is not None:
                    environ[VISIBLE] = ",".join(share.visible)
                children.append(ChildSpec(name, role, argv, environ, node_id, path))
    return children


def resolved_child(spec: ChildSpec, environ: Mapping[str, str]) -> Resolved[RouterConfig | NodeConfig]:
    """The configuration that a router's or a node's process will read, with this environment of the supervisor.

    Raises: ConfigError for a mistake in it.
    """
    section, *words = spec.argv[spec.argv.index("kvrelay") + 1 :]
    cls = next(each for each in (RouterConfig, PrefillConfig, DecodeConfig) if each.section == section)
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    return resolve(cls, flags=flags, environ={**environ, **spec.environ}, file=None)


def check_memory(specs: Sequence[ChildSpec], environ: Mapping[str, str], free_bytes: float, *, gpus: bool) -> None:
    """Check that the KV caches of all nodes fit in main memory together. `gpus`: device "auto" means a GPU here.

    A node allocates KV memory as requests need it and checks only its own cache. Without this check, nodes that share a
    machine would run out of memory later, when the last cache fills, and one of them would be killed.
    Caches whose size is given in blocks (--kv-blocks) are not counted: only the node knows the size of a block.

    Raises: ConfigError with the figures if that is more than `free_bytes`, or for a mistake in a node's configuration.
    """
    sizes: dict[str, float] = {}
    for spec in specs:
        if spec.role in ("prefill", "decode"):
            node = resolved_child(spec, environ).config
            assert isinstance(node, NodeConfig)
            if node.kv_blocks is None and (node.device == "cpu" or (node.device == "auto" and not gpus)):
                sizes[spec.name] = node.num_ranks * node.cpu_kv_gb
    free_gb = free_bytes / 2**30  # the unit of --kv-memory-gb
    if sum(sizes.values()) > free_gb:
        each = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
        raise ConfigError(
            f"the nodes' KV caches may take {sum(sizes.values()):.2f} GB of memory together ({each}), but {free_gb:.2f} GB are "
            f"free: lower --kv-memory-gb, which counts for each rank and is {CPU_KV_GB:g} by default, or start fewer nodes"
        )


def first_start_s(config: UpConfig, *, on_gpus: bool) -> float:
    """Seconds that the first start of everything may take."""
    is_default = config.start_timeout_s == UpConfig.start_timeout_s
    return _FIRST_START_S if on_gpus and is_default else config.start_timeout_s


def nodes_of(model: UpModel, config: UpConfig) -> list[tuple[ServiceRole, type[NodeConfig], int]]:
    """Role, configuration and number of a model's nodes."""
    if not model.generates:
        return [("pooling", PrefillConfig, config.prefill)]
    return [("prefill", PrefillConfig, config.prefill), ("decode", DecodeConfig, config.decode)]


def _of_pooling(sources: Mapping[str, Source], *, is_alone: bool) -> dict[str, Source]:
    """The options that a pooling model's nodes get as flags. Beside generating models, most options are meant for those. Environment
    variables may be meant for several nodes and are inherited."""
    return {
        name: source for name, source in sources.items() if name in OF_PROCESS or (is_alone and source != "environment")
    }


def role_options(role: str, config: UpConfig, share: NodeGpus | None) -> dict[str, str]:
    """The options of `config` for the nodes of `role` only, defaults included: GPUs and memory were planned with them."""
    options = {} if share is None else {"gpu_memory_utilization": str(share.utilization)}
    for name, info in field_infos(UpConfig).items():
        value = getattr(config, name)
        if info.sets is not None and info.sets[0] == role and value is not None:
            options[info.sets[1]] = str(value)
    return options


def _host_options(cls: type[NodeConfig], config: UpConfig, *, on_gpus: bool) -> dict[str, str]:
    """A node's options that depend on the other nodes of this host and on the supervisor's start timeout."""
    options: dict[str, str] = {}
    if _YIELDING_ROLE.get(config.favor) == cls.section:
        options["nice"] = str(_YIELDING_NICE)
    if cls is DecodeConfig and not on_gpus and _shares_cores(config):
        options["shared_cores"] = "true"
    allowed_s = first_start_s(config, on_gpus=on_gpus)
    if allowed_s > cls.start_timeout_s:  # a node must not give up before the supervisor does
        options["start_timeout_s"] = str(allowed_s)
    return options


def _in_other_role(
    cls: type[NodeConfig], config: UpConfig, sources: Mapping[str, Source], share: NodeGpus | None
) -> dict[str, str]:
    """The option that tells a node which of its options are different after a change of its role."""

    def options(of: type[NodeConfig]) -> dict[str, str]:
        by_role = {**role_options(of.section, config, share), **_host_options(of, config, on_gpus=share is not None)}
        return {**_given(of, config, sources), **by_role}

    other = PrefillConfig if cls is DecodeConfig else DecodeConfig
    mine, then = options(cls), options(other)
    gone = {name: None for name in mine if name not in then and name in field_infos(other)}
    different = {**gone, **{name: value for name, value in then.items() if mine.get(name) != value}}
    return {"in_other_role": json.dumps(different)} if different else {}


def _shares_cores(config: UpConfig) -> bool:
    """Whether decode nodes on the CPU leave cores to the prefill nodes while streams are still in prefill."""
    has_stages = config.decode_pp > 1 or config.decode_pp_layers
    return config.prefill > 0 and config.favor != "itl" and not has_stages


def _given(cls: type[ServiceConfig], config: UpConfig, sources: Mapping[str, Source]) -> dict[str, str]:
    """The options of `config` that are passed on to a `cls`."""
    infos = field_infos(cls)
    return {
        key: str(getattr(config, key))
        for key, source in sources.items()
        if key in infos and not infos[key].own and source not in ("default", "file")
    }


def service_command(
    cls: type[ServiceConfig], config: UpConfig, sources: Mapping[str, Source], own: dict[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment of a service with the options `own`, and those of `config` that it has too."""
    infos = field_infos(cls)
    options = _given(cls, config, sources)
    if cls is RouterConfig:
        # The router uses the model that its nodes report, since they know where they found it, whatever else a file or
        # a variable names.
        options["model"] = "none"
    options |= own
    argv = module_command("kvrelay", cls.section)
    environ: dict[str, str] = {}
    for key, value in options.items():
        if infos[key].secret:
            environ[ENV_PREFIX + key.upper()] = value
        else:
            argv += ["--" + key.replace("_", "-"), value]
    return tuple(argv), environ
