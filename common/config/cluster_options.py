"""Options of `kvrelay up` for the cluster as a whole. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.config.context_options import DecodeContextOptions, PrefillContextOptions
from common.config.fields import for_role, option
from common.config.option_groups import Favor, GpuMemoryOptions, PipelineOptions, RankOptions

Platform = Literal["machine", "ray"]


def _gpu_memory_of(role: str) -> str:
    return (
        f"Fraction of a GPU's memory for each {role} node on it (its --gpu-memory-utilization); by default the nodes "
        "on one GPU get equal parts of --gpu-memory-utilization."
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which processes `kvrelay up` starts, and what differs between the roles."""

    routers: int = option(
        1, "Routers to run, on consecutive ports, for a load balancer in front.", "Cluster", low=1, high=64
    )
    prefill: int = option(1, "Prefill nodes to run.", "Cluster", low=0, high=64)
    decode: int = option(1, "Decode nodes to run.", "Cluster", low=1, high=64)
    prefill_tp: int = for_role(
        "prefill", RankOptions, "tensor_parallel_size", "Cluster", "Tensor-parallel ranks of each prefill node."
    )
    decode_tp: int = for_role(
        "decode",
        RankOptions,
        "tensor_parallel_size",
        "Cluster",
        "Tensor-parallel ranks of each stage of each decode node.",
    )
    prefill_data_parallel_attention: bool = for_role(
        "prefill",
        RankOptions,
        "data_parallel_attention",
        "Cluster",
        "For models with experts: each of the --prefill-tp ranks holds the KV of its own prompts, and experts are spread over all.",
    )
    decode_data_parallel_attention: bool = for_role(
        "decode",
        RankOptions,
        "data_parallel_attention",
        "Cluster",
        "For models with experts: each of the --decode-tp ranks holds the KV of its own sequences, and experts are spread over all.",
    )
    decode_pp: int = for_role(
        "decode", PipelineOptions, "pipeline_parallel_size", "Cluster", "Pipeline stages of each decode node."
    )
    decode_pp_layers: str = for_role(
        "decode", PipelineOptions, "pp_layers", "Cluster", "Layers of each of these stages, as in 10,14."
    )
    prefill_context_parallel: int = for_role(
        "prefill",
        PrefillContextOptions,
        "prefill_context_parallel",
        "Cluster",
        "Groups of ranks of each prefill node that share the KV of every prompt.",
    )
    decode_context_parallel: int = for_role(
        "decode",
        DecodeContextOptions,
        "decode_context_parallel",
        "Cluster",
        "Groups of ranks of each decode node that share the KV of every sequence; N groups allow contexts N times as long.",
    )
    favor: Favor = option("balanced", "Processor priority: itl favors running streams, ttft new prompts.", "Cluster")
    tls: bool = option(
        False, "Encrypt the connections between the services, with certificates made for this run.", "Cluster"
    )
    on: Platform = option(
        "machine",
        "Where the services run: on this machine, or on the hosts of a Ray cluster (docs/ray.md), for which --redis-url must "
        "name a Redis.",
        "Cluster",
        own=True,
    )

    def ranks_of(self, role: str) -> int:
        """Ranks of each node of a role."""
        if role == "prefill":
            return self.prefill_tp * self.prefill_context_parallel
        stages = len(self.decode_pp_layers.split(",")) if self.decode_pp_layers else self.decode_pp
        return self.decode_tp * self.decode_context_parallel * stages

    address: str = option("auto", "Address of the Ray cluster's head, with --on ray.", "Cluster", own=True)
    ray_cpus_per_rank: float = option(
        1.0, "CPUs that Ray reserves for each rank of a node, with --on ray.", "Cluster", low=0.01, high=1024, own=True
    )
    pid_file: str | None = option(
        None, "JSON file that lists the running processes (name, role, pid, address) at any time.", "Cluster", own=True
    )
    start_timeout_s: float = option(
        120.0,
        "Seconds within which the cluster, and later each restarted process, must be ready. On GPUs kernels may have to be "
        "compiled first: unless this is changed, the first start may take 1800 there.",
        "Cluster",
        low=1,
        own=True,
    )
    prefill_gpu_memory_utilization: float | None = for_role(
        "prefill", GpuMemoryOptions, "gpu_memory_utilization", "Device", _gpu_memory_of("prefill"), default=None
    )
    decode_gpu_memory_utilization: float | None = for_role(
        "decode", GpuMemoryOptions, "gpu_memory_utilization", "Device", _gpu_memory_of("decode"), default=None
    )
