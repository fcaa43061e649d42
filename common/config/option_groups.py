"""Option groups: each option of any service is declared once, here, in a file beside this one or in
`common.config.service_configs`.

A service's configuration inherits the groups it needs; where it differs (another default, another help text), it
declares a `variant`. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.base.hashing import BLOCK_SIZE
from common.config.fields import NODE_ID, host_option, option, port_option, reached_at_option

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Favor = Literal["itl", "balanced", "ttft"]
KvTransport = Literal["auto", "zmq", "shm", "cuda_ipc", "collective"]
DeviceName = Literal["auto", "cpu", "cuda"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"]
Quantization = Literal["auto", "fp8", "int8", "int4"]
ModelImpl = Literal["auto", "native", "transformers"]
TaskName = Literal["auto", "generate", "embed", "score"]

CPU_KV_GB = 1.0
"""Default KV cache memory of a rank on a CPU."""

_network_option, _model_option, _lora_option, _capacity_option, _device_option, _rank_option = (
    partial(option, group=group) for group in ("Network", "Model", "LoRA", "Capacity", "Device", "Ranks")
)
_rank_count_option = partial(_rank_option, low=1, high=64, own=True)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """The interface that a service listens on."""

    host: str = host_option("127.0.0.1", "Interface to listen on.")


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ListenOptions):
    """Port and certificate of the HTTP API."""

    port: int = port_option(8000, "Port of the HTTP API.")
    idle_connection_timeout_s: float = _network_option(
        65.0,
        "Seconds after which a client's idle connection is closed: longer than proxies and clients keep theirs, because a request "
        "that is sent at that moment is lost.",
        low=0.1,
        high=86_400,
    )
    ssl_certfile: str | None = _network_option(
        None, "File with the certificate that clients see, in PEM: the HTTP API is then HTTPS."
    )
    ssl_keyfile: str | None = _network_option(
        None, "File with the private key of --ssl-certfile; by default the same file."
    )


@dataclass(frozen=True, kw_only=True)
class NodeAddressOptions(ListenOptions):
    """How the cluster names and reaches a node."""

    node_id: str | None = _network_option(
        None,
        "Node name in the cluster, kept over restarts; by default <role>-<host name>-<random>.",
        own=True,
        form=NODE_ID,
    )
    advertise_host: str | None = reached_at_option(
        None,
        "Name or address by which others reach this node; by default --host, or if that is every interface, the "
        "address that routes to Redis.",
    )
    port: int = port_option(0, "Port of the control socket; 0 picks a free one.")
    data_port: int = port_option(0, "Port of the KV data socket; 0 picks a free one.")


@dataclass(frozen=True, kw_only=True)
class MembershipOptions:
    """How a service takes part in the cluster's membership."""

    redis_url: str = _network_option(
        "redis://127.0.0.1:6379/0",
        "Redis for the cluster membership: redis://, unix://, redis+cluster:// or redis+sentinel://; rediss for TLS.",
        secret=True,
    )
    lease_s: float = _network_option(3.0, "Lease in seconds: longer silence counts as failure.", low=0.3, high=86_400)
    tls_dir: str | None = _network_option(
        None,
        "Folder with this service's certificate, as `kvrelay keys` makes it: connections between services are then "
        "encrypted, and only services with certificates of the same authority are accepted.",
        own=True,
    )
    allow_plain_collectives: bool = _network_option(
        False, "With --tls-dir: let NCCL and gloo connect ranks on several hosts, although they cannot encrypt."
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and how its weights are loaded."""

    model: str = _model_option(
        "demo", "Model folder, GGUF file, hub name or ORG/NAME@REVISION; demo is included.", "--model-path"
    )
    tokenizer: str | None = _model_option(
        None,
        "Folder or hub name of the tokenizer and chat template to use instead of the model's own, such as for a GGUF file whose "
        "tokenizer cannot be read; the same on all nodes and routers.",
    )
    served_model_name: str | None = _model_option(
        None,
        "Name of the model in the API; by default the name of its folder. With several names, clients may use any of them; "
        "metrics and nodes use the first.",
        several=True,
    )
    dtype: DtypeName = _model_option(
        "auto",
        "Type of weights and activations; auto uses the type that the model was saved in, but on a GPU bfloat16 instead of "
        "float32.",
    )
    model_impl: ModelImpl = _model_option(
        "auto",
        "What computes the model's layers: native kernels and families, or the model's class in the library transformers "
        "(the extra kvrelay[models]); auto uses the latter if there is no native family. The same on all nodes.",
    )
    task: TaskName = _model_option("auto", "What the model is used for; auto decides by its class and files.")
    load_format: LoadFormat = _model_option(
        "auto", "auto reads the weights; dummy generates random ones from config.json alone."
    )
    seed: int = _model_option(0, "Random seed of dummy weights.")
    max_model_len: int | None = _model_option(
        None,
        "Maximum sequence length in tokens, prompt and answer together; by default the model's limit.",
        "--context-length",
        low=1,
    )
    kv_cache_dtype: KvCacheDtype = _model_option(
        "auto", "Type of the KV cache, the same on all nodes; auto uses the model's type; fp8 means fp8_e4m3."
    )
    quantization: Quantization = _model_option(
        "auto",
        "auto reads weights in the format that the checkpoint declares; int8 and int4 quantize floating-point weights "
        "while loading, the same on all nodes; fp8 refuses a checkpoint that is not FP8.",
    )


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """How the experts of a mixture are placed on tensor-parallel ranks."""

    rebalance_experts: float | None = _model_option(
        None,
        "Move experts among tensor-parallel ranks while they serve: those of a layer where the rank with most load has more than "
        "this many times the mean, such as 1.1; by default they never move.",
        low=1,
        high=1000,
    )
    redundant_experts: int = _model_option(
        0,
        "Slots of each layer for second copies of its most loaded experts, over all ranks of a stage together; needs "
        "--rebalance-experts.",
        low=0,
        high=10_000,
    )


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The LoRA adapters that a node serves."""

    lora: str | None = _lora_option(
        None,
        "LoRA adapters as NAME=FOLDER, in peft's files; requests choose one by its name as the model.",
        "--lora-modules",
        several=True,
    )
    max_loras: int = _lora_option(
        8, "Maximum number of LoRA adapters in memory; the least recently used one is evicted.", low=1
    )
    max_lora_rank: int = _lora_option(256, "Maximum rank of a LoRA adapter.", low=1, high=256)


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """How much a node computes in one step and how much KV it holds."""

    max_num_seqs: int = _capacity_option(64, "Maximum number of sequences in one step.", low=1, high=65_536)
    kv_blocks: int | None = _capacity_option(
        None,
        f"Number of KV cache blocks of {BLOCK_SIZE} tokens, for all block tables of a model with sliding windows together; by "
        "default as many as fit in --kv-memory-gb.",
        "--num-gpu-blocks-override",
        low=2,
    )
    kv_memory_gb: float | None = _capacity_option(
        None,
        "KV cache memory of each rank in GB, unless --kv-blocks is given; by default "
        f"{CPU_KV_GB:g} on a CPU, and on a GPU what --gpu-memory-utilization leaves.",
        low=1e-6,
        high=1e6,
    )
    packed_cache_gb: float | None = _capacity_option(
        None,
        "Maximum size in GB of the cache of packed weights, which nodes on one host share (`kvrelay cache`); by default "
        "a quarter of the free disk space; 0: none.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device that steps run on, and how they run there."""

    device: DeviceName = _device_option(
        "auto", "Device to compute on: auto uses a CUDA GPU if PyTorch finds one, else the CPU."
    )
    enforce_eager: bool = _device_option(
        False, "Run decode steps on a GPU without CUDA graphs: slower steps, faster start."
    )
    async_scheduling: bool | None = _device_option(
        None, "Prepare the next step while the current one runs; by default on a GPU only."
    )


@dataclass(frozen=True, kw_only=True)
class GpuMemoryOptions:
    """How much GPU memory a node takes."""

    gpu_memory_utilization: float = _device_option(
        0.9,
        "Fraction of a GPU's total memory that one rank of this node may use, including weights and KV cache; the "
        "fractions of two nodes on one GPU must fit together.",
        low=0.01,
        high=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """How KV moves between nodes."""

    kv_transport: KvTransport = _network_option(
        "auto",
        "KV transport: auto uses CUDA IPC or shared memory within one host, NCCL between CUDA devices, else ZMQ; "
        "collective is torch.distributed (gloo or NCCL).",
    )


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The ranks of a node."""

    tensor_parallel_size: int = _rank_count_option(
        1, "Tensor-parallel ranks: they share every layer of the model.", "--tp"
    )
    data_parallel_attention: bool = _rank_option(
        False,
        "For models with experts: each of the --tensor-parallel-size ranks holds the KV of its own sequences, and computes them "
        "alone, except for the experts and the LM head, which are spread over the ranks.",
        "--enable-dp-attention",
        own=True,
    )
    nnodes: int = _rank_count_option(1, "Number of hosts that this node's ranks are spread over.")
    node_rank: int = _rank_option(0, "Index of this host among them; 0 is the leader.", low=0, high=63, own=True)
    master_addr: str = reached_at_option(
        "127.0.0.1", "Address of the leader's host for ranks on others.", group="Ranks"
    )
    master_port: int = port_option(
        0, "Port on the leader's host; 0 picks a free one, which works on a single host only.", group="Ranks"
    )
    rank_timeout_s: float = _rank_option(
        120.0, "Seconds that ranks wait for each other; must exceed the longest step.", low=0.1
    )
    start_timeout_s: float = _rank_option(
        600.0, "Seconds that a node may take to start, with all its ranks.", low=1, own=True
    )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The pipeline stages of a node."""

    pipeline_parallel_size: int = _rank_count_option(
        1, "Pipeline stages that this node's layers are split into, each with --tensor-parallel-size ranks.", "--pp"
    )
    pp_layers: str = _rank_option(
        "", "Layers of each stage, as in 10,14; empty splits the work evenly, including the LM head.", own=True
    )


@dataclass(frozen=True, kw_only=True)
class PrefillContextOptions:
    """The context-parallel ranks of a prefill node."""

    prefill_context_parallel: int = _rank_count_option(
        1,
        "Groups of --tensor-parallel-size ranks that share the KV of every prompt: each holds every N-th block of it and all of "
        "the weights.",
        "--prefill-context-parallel-size",
        "--pcp",
    )


@dataclass(frozen=True, kw_only=True)
class DecodeContextOptions:
    """The context-parallel ranks of a decode node."""

    decode_context_parallel: int = _rank_count_option(
        1,
        "Groups of --tensor-parallel-size ranks in each stage that share the KV of every sequence: each holds every N-th block "
        "of it and all of the stage's weights, so that contexts may be N times as long.",
        "--decode-context-parallel-size",
        "--dcp",
    )


@dataclass(frozen=True, kw_only=True)
class AdminOptions:
    """The admin API."""

    admin_port: int = port_option(
        0, "Port of the admin API, which exists only with --admin-token; 0 picks a free one.", group="Admin"
    )
    admin_token: str = option(
        "",
        "Token that `kvrelay admin` must send, the same in the whole cluster; without one there is no admin API.",
        group="Admin",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class AdminHostOptions(AdminOptions):
    """The admin API of a service that may run on any host."""

    admin_host: str = host_option("127.0.0.1", "Interface that the admin API listens on.", group="Admin")
