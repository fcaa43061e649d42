"""The configuration of each service; `common.config.sources` says where the values come from.

There is one frozen dataclass per service, made of the groups in `common.config.option_groups`. `--help` lists the options of
the base that is named last first. Pure data, in every process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

from common.base.errors import ConfigError
from common.base.logs import LogFormat
from common.config.cluster_options import ClusterOptions
from common.config.fields import NAME, check_bounds, field_infos, for_role, listed, option, variant
from common.config.option_groups import (
    CPU_KV_GB,
    AdminHostOptions,
    AdminOptions,
    CapacityOptions,
    DecodeContextOptions,
    DeviceOptions,
    ExpertOptions,
    GpuMemoryOptions,
    HttpOptions,
    LoraOptions,
    MembershipOptions,
    ModelOptions,
    NodeAddressOptions,
    PipelineOptions,
    PrefillContextOptions,
    RankOptions,
    RelayOptions,
)
from common.config.router_options import ClientOptions, PlannerOptions, RoutingOptions
from common.config.speculation import HEAD_METHODS, Speculation, SpeculationOptions, parse_speculation

LogLevel = Literal["debug", "info", "warning", "error"]
_capacity_option = partial(option, group="Capacity")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The options that every service has."""

    section: ClassVar[str] = ""
    """Name of the service's TOML table and of its subcommand."""

    cluster: str = option(
        "default", "Cluster name: services see only others with the same name.", group="Network", form=NAME
    )
    log_level: LogLevel = option("info", "Minimum severity of log messages.", "--uvicorn-log-level", group="General")
    log_format: LogFormat = option("text", "Form of log lines: text, or one JSON object each.", group="General")

    def __post_init__(self) -> None:
        for name, info in field_infos(type(self)).items():
            check_bounds(name, getattr(self, name), info)
            if info.several:
                listed(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RouterConfig(
    AdminHostOptions, PlannerOptions, RoutingOptions, ClientOptions, MembershipOptions, HttpOptions, ServiceConfig
):
    """The HTTP front end: one OpenAI-compatible address for all nodes of a cluster."""

    section: ClassVar[str] = "router"

    model: str | None = variant(
        ModelOptions,
        "model",
        default=None,
        help="Folder or hub name of the tokenizer to use; by default the router uses that of the nodes' model.",
    )
    tokenizer: str | None = variant(ModelOptions, "tokenizer")
    served_model_name: str | None = variant(ModelOptions, "served_model_name")
    preload: str | None = option(
        None,
        "Models, as nodes name them, whose tokenizers are loaded at the start; others are loaded when a node registers them.",
        group="Model",
        several=True,
        own=True,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Address to send a trace of each request to, with OTLP over HTTP, such as http://localhost:4318/v1/traces.",
        group="Logging",
    )
    max_body_mb: float = option(
        4.0, "Maximum size of a request body in MB; larger ones get 413.", group="Clients", low=0.001
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError("--root-path must begin with / and not end with it")
        if self.allow_runtime_lora and not self.admin_token:
            raise ConfigError(
                "--allow-runtime-lora needs --admin-token: adapters are loaded through nodes' admin ports"
            )
        if self.allow_runtime_lora and not self.lora_dir:
            raise ConfigError("--allow-runtime-lora needs --lora-dir: the folder of the adapters that clients may load")


@dataclass(frozen=True)
class StepTokens:
    """Default of `max_num_batched_tokens`, by device."""

    on_cpu: int
    on_gpu: int

    @property
    def help(self) -> str:
        return (
            "Maximum number of tokens computed in one step; smaller steps mean smoother streams, larger ones more "
            f"throughput. By default {self.on_cpu}, on a GPU {self.on_gpu}."
        )


_PREFILL_STEP, _DECODE_STEP = StepTokens(512, 8192), StepTokens(256, 2048)


def options_in_other_role(text: str | None) -> dict[str, object]:
    """Options by name from the value of `--in-other-role`. Raises: ConfigError if it is not a JSON object of plain values."""
    try:
        options: Any = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"--in-other-role {text!r} is not valid JSON") from error
    if not isinstance(options, dict) or any(isinstance(value, list | dict) for value in options.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ConfigError(f"--in-other-role {text!r} is not a JSON object of options")
    return cast("dict[str, object]", options)


@dataclass(frozen=True, kw_only=True)
class NodeConfig(
    AdminHostOptions,
    RankOptions,
    RelayOptions,
    GpuMemoryOptions,
    DeviceOptions,
    CapacityOptions,
    LoraOptions,
    ExpertOptions,
    ModelOptions,
    MembershipOptions,
    NodeAddressOptions,
    ServiceConfig,
):
    """Options that prefill and decode nodes share."""

    step_tokens: ClassVar[StepTokens] = _PREFILL_STEP

    max_num_batched_tokens: int | None = _capacity_option(None, _PREFILL_STEP.help, low=1, own=True)
    transfer_timeout_s: float = option(
        60.0, "Seconds without progress after which a KV transfer is aborted.", group="Network", low=0.001
    )
    threads: int | None = _capacity_option(
        None, "Compute threads; by default PyTorch's choice, all cores.", low=1, high=4096
    )
    nice: int = _capacity_option(
        0, "Niceness to add to this process; positive values need no privileges.", low=-20, high=19
    )
    in_other_role: str | None = _capacity_option(
        None,
        "Options that are different after `kvrelay admin flip` has given this node the other role, as a JSON object such as "
        '{"max_num_batched_tokens": 256}; null stands for the default.',
        own=True,
    )

    @property
    def context_parallel(self) -> int:
        """Groups of ranks that share the blocks of each sequence."""
        return 1

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts together."""
        return self.tensor_parallel_size * self.context_parallel

    def __post_init__(self) -> None:
        super().__post_init__()
        options_in_other_role(self.in_other_role)
        if self.nnodes > 1 and not self.may_use_collectives:
            raise ConfigError(
                "--tls-dir refuses a node on several hosts, whose ranks exchange activations without encryption: "
                "--allow-plain-collectives allows it"
            )

    @property
    def may_use_collectives(self) -> bool:
        """Whether NCCL and gloo may connect hosts: they cannot encrypt."""
        return self.tls_dir is None or self.allow_plain_collectives

    @property
    def cpu_kv_gb(self) -> float:
        """KV cache memory of each rank on a CPU, unless `kv_blocks` is given."""
        return self.kv_memory_gb or CPU_KV_GB


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(PrefillContextOptions, NodeConfig):
    """A node that computes prompts and relays their KV."""

    section: ClassVar[str] = "prefill"

    speculate: str = variant(
        SpeculationOptions,
        "speculate",
        help="As decode nodes have it. With mtp and eagle:PATH the prompt's KV includes that of the head that guesses tokens; other "
        "methods concern decode nodes only.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.speculation  # raises ConfigError

    @property
    def speculation(self) -> Speculation | None:
        """How decode nodes guess, if that concerns prefill nodes. Raises: ConfigError."""
        found = parse_speculation(self.speculate, 1)
        return found if found is not None and found.method in HEAD_METHODS else None

    @property
    def context_parallel(self) -> int:
        return self.prefill_context_parallel


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(SpeculationOptions, PipelineOptions, DecodeContextOptions, NodeConfig):
    """A node that generates: it receives KV and runs continuous batching."""

    section: ClassVar[str] = "decode"
    step_tokens: ClassVar[StepTokens] = _DECODE_STEP

    max_num_batched_tokens: int | None = variant(NodeConfig, "max_num_batched_tokens", help=_DECODE_STEP.help)
    local_prefill_chunk: int = _capacity_option(
        64, "Maximum number of prompt tokens that one step prefills beside running streams.", low=1
    )
    shared_cores: bool = _capacity_option(
        False,
        "Prefill nodes compute on this node's processor cores: while some of its streams are still in prefill, this node rests "
        "between steps, longer with more such streams, at most 0.1 s, so that the prompts get the cores.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.speculation  # raises ConfigError
        if self.shared_cores and self._num_stages > 1:
            raise ConfigError("--shared-cores does not work with pipeline stages")

    @property
    def context_parallel(self) -> int:
        return self.decode_context_parallel

    @property
    def num_ranks(self) -> int:
        return super().num_ranks * self._num_stages

    @property
    def _num_stages(self) -> int:
        return len(self.pp_layers.split(",")) if self.pp_layers else self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class UpConfig(
    AdminOptions,
    PlannerOptions,
    RoutingOptions,
    ClientOptions,
    SpeculationOptions,
    DeviceOptions,
    CapacityOptions,
    ClusterOptions,
    LoraOptions,
    ExpertOptions,
    ModelOptions,
    RelayOptions,
    HttpOptions,
    ServiceConfig,
):
    """A whole cluster on this machine. An option that services have too is passed on to them."""

    section: ClassVar[str] = "up"

    model: str = variant(
        ModelOptions,
        "model",
        several=True,
        help="Model folder, GGUF file or hub name; demo is a small model that is included. With several models, each gets "
        "nodes of its own; a model that embeds or scores needs prefill nodes only.",
    )
    prefill_max_num_batched_tokens: int | None = for_role(
        "prefill", NodeConfig, "max_num_batched_tokens", f"Of prefill nodes: {_PREFILL_STEP.help}", group="Capacity"
    )
    decode_max_num_batched_tokens: int | None = for_role(
        "decode", DecodeConfig, "max_num_batched_tokens", f"Of decode nodes: {_DECODE_STEP.help}", group="Capacity"
    )
    gpu_memory_utilization: float = variant(
        GpuMemoryOptions,
        "gpu_memory_utilization",
        help="Fraction of each GPU's memory that the nodes on it may use together.",
    )
    redis_url: str | None = variant(
        MembershipOptions, "redis_url", default=None, help="URL of a running Redis; by default one is started."
    )
    port: int = variant(
        HttpOptions, "port", help="Port of the HTTP API, with several routers that of the first; 0 picks free ones."
    )
    admin_port: int = variant(
        AdminOptions,
        "admin_port",
        help="Port of the router's admin API, with several routers that of the first; 0 picks free ones.",
    )
    admin_token: str = variant(
        AdminOptions,
        "admin_token",
        help="Token that `kvrelay admin` must send, the same in the whole cluster; without one a random one is "
        "generated, which `kvrelay admin` on this machine finds.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.speculation  # raises ConfigError
        if self.planner == "publish":
            raise ConfigError(
                "--planner publish is for routers whose nodes an autoscaler starts; `kvrelay up` starts its own: give apply"
            )
        if self.planner == "apply" and self.on == "machine":
            self._check_trades()

    def _check_trades(self) -> None:
        """Raises: ConfigError if the nodes of this machine cannot trade roles."""
        if self.planner_max_nodes is not None:
            raise ConfigError("--planner-max-nodes needs --on ray: on one machine nodes only trade roles")
        if self.redis_url is not None:
            raise ConfigError(
                "--planner apply needs the Redis that `kvrelay up` starts, because the numbers in another one may be those of "
                "several machines: remove --redis-url, or give --planner advise"
            )
        if not self.prefill:
            raise ConfigError(
                "--planner apply needs a prefill node: with --prefill 0 decode nodes compute all prompts on purpose"
            )


SERVICES: tuple[type[ServiceConfig], ...] = (RouterConfig, PrefillConfig, DecodeConfig, UpConfig)
