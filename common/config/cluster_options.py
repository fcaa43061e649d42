"""Options of `kvrelay up` for the cluster as a whole. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.config.fields import for_role, option
from common.config.option_groups import (
    DecodeContextOptions,
    Favor,
    GpuMemoryOptions,
    PipelineOptions,
    PrefillContextOptions,
    RankOptions,
)

Platform = Literal["machine", "ray"]

_cluster_option = partial(option, group="Cluster")


def _gpu_memory_of(role: str) -> str:
    return (
        f"Fraction of a GPU's memory for each {role} node on it (its --gpu-memory-utilization); by default the nodes "
        "on one GPU get equal parts of --gpu-memory-utilization."
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which processes `kvrelay up` starts, and what differs between the roles."""

    routers: int = _cluster_option(
        1, "Routers to run, on consecutive ports, for a load balancer in front.", low=1, high=64
    )
    prefill: int = _cluster_option(1, "Prefill nodes to run.", low=0, high=64)
    decode: int = _cluster_option(1, "Decode nodes to run.", low=1, high=64)
    prefill_tp: int = for_role(
        "prefill", RankOptions, "tensor_parallel_size", "Tensor-parallel ranks of each prefill node."
    )
    decode_tp: int = for_role(
        "decode", RankOptions, "tensor_parallel_size", "Tensor-parallel ranks of each stage of each decode node."
    )
    prefill_data_parallel_attention: bool = for_role(
        "prefill",
        RankOptions,
        "data_parallel_attention",
        "For models with experts: each of the --prefill-tp ranks holds the KV of its own prompts, and experts are spread over all.",
    )
    decode_data_parallel_attention: bool = for_role(
        "decode",
        RankOptions,
        "data_parallel_attention",
        "For models with experts: each of the --decode-tp ranks holds the KV of its own sequences, and experts are spread over all.",
    )
    decode_pp: int = for_role(
        "decode", PipelineOptions, "pipeline_parallel_size", "Pipeline stages of each decode node."
    )
    decode_pp_layers: str = for_role(
        "decode", PipelineOptions, "pp_layers", "Layers of each of these stages, as in 10,14."
    )
    prefill_context_parallel: int = for_role(
        "prefill",
        PrefillContextOptions,
        "prefill_context_parallel",
        "Groups of ranks of each prefill node that share the KV of every prompt.",
    )
    decode_context_parallel: int = for_role(
        "decode",
        DecodeContextOptions,
        "decode_context_parallel",
        "Groups of ranks of each decode node that share the KV of every sequence; N groups allow contexts N times as long.",
    )
    favor: Favor = _cluster_option("balanced", "Processor priority: itl favors running streams, ttft new prompts.")
    tls: bool = _cluster_option(
        False, "Encrypt the connections between the services, with certificates made for this run."
    )
    on: Platform = _cluster_option(
        "machine",
        "Where the services run: on this machine, or on the hosts of a Ray cluster (docs/ray.md), for which --redis-url must "
        "name a Redis.",
        own=True,
    )

    def ranks_of(self, role: str) -> int:
        """Ranks of each node of a role."""
        if role == "prefill":
            return self.prefill_tp * self.prefill_context_parallel
        stages = len(self.decode_pp_layers.split(",")) if self.decode_pp_layers else self.decode_pp
        return self.decode_tp * self.decode_context_parallel * stages

    address: str = _cluster_option("auto", "Address of the Ray cluster's head, with --on ray.", own=True)
    ray_cpus_per_rank: float = _cluster_option(
        1.0, "CPUs that Ray reserves for each rank of a node, with --on ray.", low=0.01, high=1024, own=True
    )
    pid_file: str | None = _cluster_option(
        None, "JSON file that lists the running processes (name, role, pid, address) at any time.", own=True
    )
    start_timeout_s: float = _cluster_option(
        120.0,
        "Seconds within which the cluster, and later each restarted process, must be ready. On GPUs kernels may have to be "
        "compiled first: unless this is changed, the first start may take 1800 there.",
        low=1,
        own=True,
    )
    prefill_gpu_memory_utilization: float | None = for_role(
        "prefill", GpuMemoryOptions, "gpu_memory_utilization", _gpu_memory_of("prefill"), group="Device", default=None
    )
    decode_gpu_memory_utilization: float | None = for_role(
        "decode", GpuMemoryOptions, "gpu_memory_utilization", _gpu_memory_of("decode"), group="Device", default=None
    )
