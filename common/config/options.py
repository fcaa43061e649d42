"""What every service can be told. `common.config.sources` says where the values come from.

One frozen dataclass per service; a field's help text, bounds and other names stand beside its default
and nowhere else. The command line, the environment variables and the TOML keys are derived from them.
Pure data, in every process.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from common.base.errors import ConfigError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]
Favor = Literal["itl", "balanced", "ttft"]
KvTransport = Literal["auto", "zmq", "shm", "cuda_ipc", "collective"]
DeviceName = Literal["auto", "cpu", "cuda"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"]
Quantization = Literal["auto", "fp8"]
GenerationConfig = Literal["auto", "none"]


CPU_KV_GB = 1.0
"""Memory for a rank's KV on a CPU where nobody says how much."""
PREFILL_ROWS, DECODE_ROWS = (512, 8192), (256, 2048)
"""Tokens that one step may compute where nobody says: on a CPU, on a card."""


@dataclass(frozen=True)
class FieldInfo:
    """All about one field that its type does not say."""

    help: str
    group: str = "General"
    """Heading under which `--help` lists it."""
    low: float | None = None
    high: float | None = None
    aliases: tuple[str, ...] = ()
    """Flags that users know from vLLM or SGLang for the same thing."""
    own: bool = False
    """Means something different for each service, so it cannot stand at a file's top level."""
    secret: bool = False
    """Never shown, and handed to child processes by environment, not on their command line."""


def _option(
    default: Any,
    help: str,
    group: str,
    *aliases: str,
    low: float | None = None,
    high: float | None = None,
    own: bool = False,
    secret: bool = False,
) -> Any:
    info = FieldInfo(help, group, low, high, aliases, own, secret)
    return dataclasses.field(default=default, metadata={"info": info})


def _host() -> Any:
    return _option("127.0.0.1", "Interface to listen on.", "Network", own=True)


def _cluster() -> Any:
    return _option("default", "Services see each other only inside one cluster name.", "Network")


def _redis_url() -> Any:
    text = "Redis that holds the membership (redis://, rediss:// or unix://)."
    return _option("redis://127.0.0.1:6379/0", text, "Network", secret=True)


def _lease_s() -> Any:
    return _option(3.0, "Who is silent for so long (seconds) counts as dead.", "Network", low=0.3)


def _log_level() -> Any:
    return _option("info", "Least severe messages to log.", "General", "--uvicorn-log-level")


def _served_model_name() -> Any:
    return _option(None, "Name that clients use for the model; by default that of its folder.", "Model")


def _dtype() -> Any:
    text = "Type of weights and activations; auto takes what the model was saved in, on a GPU bfloat16 for float32."
    return _option("auto", text, "Model")


def _load_format() -> Any:
    return _option("auto", "auto reads the weights; dummy draws random ones from config.json alone.", "Model")


def _seed() -> Any:
    return _option(0, "Seed of dummy weights.", "Model")


def _max_model_len() -> Any:
    text = "Longest sequence, prompt and answer together, in tokens; by default what the model allows."
    return _option(None, text, "Model", "--context-length", low=1)


def _max_num_seqs() -> Any:
    return _option(64, "Sequences that one step may hold.", "Capacity", low=1)


def _max_num_batched_tokens(on_cpu: int, on_card: int) -> Any:
    text = (
        "Tokens that one step may compute; smaller steps mean smoother streams, larger ones more throughput. By default "
        f"{on_cpu}, on a GPU {on_card}."
    )
    return _option(None, text, "Capacity", low=1, own=True)


def _kv_blocks() -> Any:
    text = "KV cache blocks of 16 tokens; by default as many as fit in --kv-memory-gb."
    return _option(None, text, "Capacity", "--num-gpu-blocks-override", low=2)


def _kv_memory_gb() -> Any:
    text = (
        "Memory for each rank's KV cache, in GB, unless --kv-blocks says how many; by default "
        f"{CPU_KV_GB:g} on a CPU, on a GPU what --gpu-memory-utilization leaves."
    )
    return _option(None, text, "Capacity", low=1e-6)


def _device() -> Any:
    text = "Where the model computes: auto takes a CUDA card where PyTorch finds one, else the CPU."
    return _option("auto", text, "Device")


def _gpu_memory_utilization() -> Any:
    text = (
        "Part of a card's whole memory that one rank of this node may take, its weights, KV cache and everything else "
        "together; two nodes on one card need fractions that fit side by side."
    )
    return _option(0.9, text, "Device", low=0.01, high=1.0)


def _share_of_card(whose: str) -> Any:
    text = (
        f"Part of a card's memory for each {whose} node on it, as its --gpu-memory-utilization; by default the nodes of "
        "one card get equal parts of 0.9."
    )
    return _option(None, text, "Device", low=0.01, high=1.0)


def _enforce_eager() -> Any:
    return _option(False, "Run decode steps on a GPU without CUDA graphs: slower, quicker to start.", "Device")


def _async_scheduling() -> Any:
    text = "Prepare the next step while the last one runs; by default on a GPU only."
    return _option(None, text, "Device")


def _kv_cache_dtype() -> Any:
    text = "Type of the KV cache, alike on all nodes; auto takes that of the model; fp8 means fp8_e4m3."
    return _option("auto", text, "Model")


def _quantization() -> Any:
    text = "auto reads weights as the checkpoint says they are stored; fp8 refuses a checkpoint that is not FP8."
    return _option("auto", text, "Model")


def _kv_transport() -> Any:
    text = (
        "How KV travels: auto takes CUDA IPC or shared memory within one host, NCCL between CUDA devices, else ZMQ; "
        "collective is torch.distributed (gloo or NCCL)."
    )
    return _option("auto", text, "Network")


def _api_key() -> Any:
    return _option("", "Key that clients must send as a bearer token; empty lets everyone in.", "Clients", secret=True)


def _admin_port() -> Any:
    text = "Port of the admin API, which exists only with --admin-token; 0 takes any free one."
    return _option(0, text, "Admin", low=0, high=65535, own=True)


def _admin_host() -> Any:
    return _option("127.0.0.1", "Interface that the admin API listens on.", "Admin", own=True)


def _admin_token(otherwise: str) -> Any:
    text = f"Token that `kvrelay admin` must show, the same in the whole cluster; without one {otherwise}."
    return _option("", text, "Admin", secret=True)


def _chat_template() -> Any:
    return _option(None, "File of a Jinja chat template, instead of the model's own.", "Clients")


def _generation_config() -> Any:
    text = (
        "Where a request says nothing of temperature, top_p, top_k, min_p, repetition_penalty or the length of the answer: "
        "auto takes what the model's generation_config.json says, none OpenAI's defaults."
    )
    return _option("auto", text, "Clients")


def _request_timeout_s() -> Any:
    return _option(600.0, "Seconds after which an unfinished request is given up.", "Clients", low=0.001)


def _max_waiting() -> Any:
    text = "Requests that may wait for a first token before new ones get 429."
    return _option(256, text, "Clients", low=1)


def _local_prefill_tokens() -> Any:
    text = (
        "Prompts with at most so many uncached tokens are prefilled by the decode node itself; by default kv_aware "
        "decides by its estimates, and 32 under the other policies."
    )
    return _option(None, text, "Routing", low=0)


def _policy() -> Any:
    text = "How nodes are picked: kv_aware, least_load, round_robin, random, power_of_two or session."
    return _option("kv_aware", text, "Routing")


def _slo_ttft() -> Any:
    text = "Answer 429 early where the first token would probably take longer than so many seconds; 0: never."
    return _option(0.0, text, "Clients", low=0)


def _slo_tpot() -> Any:
    text = "Answer 429 early where each token would probably take longer than so many seconds; 0: never."
    return _option(0.0, text, "Clients", low=0)


def _max_queue_wait_s() -> Any:
    text = "Seconds that the router holds a request back while no node has use for it, before it gets 429."
    return _option(60.0, text, "Clients", low=0)


def _max_attempts() -> Any:
    return _option(3, "Tries in a row that may bring no token before a client gets an error.", "Routing", low=1)


def _index_blocks() -> Any:
    text = "Blocks that the router's prefix index knows at most, at about 60 bytes each; the longest unused go first."
    return _option(10_000_000, text, "Routing", low=1)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What every service has."""

    section: ClassVar[str] = ""
    """Its table in the TOML file, and its subcommand."""

    cluster: str = _cluster()
    log_level: LogLevel = _log_level()

    def __post_init__(self) -> None:
        for name, info in field_infos(type(self)).items():
            _check_bounds(name, getattr(self, name), info)


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServiceConfig):
    """The HTTP front: one OpenAI-compatible address for all nodes of a cluster."""

    section: ClassVar[str] = "router"

    host: str = _host()
    port: int = _option(8000, "Port of the HTTP API.", "Network", low=0, high=65535, own=True)
    redis_url: str = _redis_url()
    lease_s: float = _lease_s()
    model: str | None = _option(
        None,
        "Folder or hub name whose tokenizer to use; by default the one that the nodes report.",
        "Model",
        "--model-path",
    )
    served_model_name: str | None = _served_model_name()
    chat_template: str | None = _chat_template()
    generation_config: GenerationConfig = _generation_config()
    api_key: str = _api_key()
    request_timeout_s: float = _request_timeout_s()
    max_body_mb: float = _option(4.0, "Larger request bodies are refused (413), in MB.", "Clients", low=0.001)
    max_waiting: int = _max_waiting()
    max_queue_wait_s: float = _max_queue_wait_s()
    slo_ttft: float = _slo_ttft()
    slo_tpot: float = _slo_tpot()
    local_prefill_tokens: int | None = _local_prefill_tokens()
    policy: str = _policy()
    max_attempts: int = _max_attempts()
    admin_port: int = _admin_port()
    admin_host: str = _admin_host()
    admin_token: str = _admin_token("there is no admin API")
    index_blocks: int = _index_blocks()


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ServiceConfig):
    """What prefill and decode nodes share."""

    default_rows: ClassVar[tuple[int, int]] = PREFILL_ROWS
    """Of `max_num_batched_tokens`: on a CPU, on a card."""

    model: str = _option(
        "demo", "Model folder or hub name; demo is the small model that comes along.", "Model", "--model-path"
    )
    served_model_name: str | None = _served_model_name()
    node_id: str | None = _option(
        None, "Name in the cluster, kept over restarts; by default <role>-<host name>-<random>.", "Network", own=True
    )
    host: str = _host()
    advertise_host: str | None = _option(
        None,
        "Name or address under which others reach this node; by default --host, and where that is every interface, "
        "the address that routes to Redis.",
        "Network",
        own=True,
    )
    port: int = _option(0, "Port of the control socket; 0 takes any free one.", "Network", low=0, high=65535, own=True)
    data_port: int = _option(
        0, "Port of the KV data socket; 0 takes any free one.", "Network", low=0, high=65535, own=True
    )
    redis_url: str = _redis_url()
    dtype: DtypeName = _dtype()
    load_format: LoadFormat = _load_format()
    seed: int = _seed()
    max_model_len: int | None = _max_model_len()
    max_num_seqs: int = _max_num_seqs()
    max_num_batched_tokens: int | None = _max_num_batched_tokens(*PREFILL_ROWS)
    kv_blocks: int | None = _kv_blocks()
    kv_memory_gb: float | None = _kv_memory_gb()
    device: DeviceName = _device()
    gpu_memory_utilization: float = _gpu_memory_utilization()
    enforce_eager: bool = _enforce_eager()
    async_scheduling: bool | None = _async_scheduling()
    kv_cache_dtype: KvCacheDtype = _kv_cache_dtype()
    quantization: Quantization = _quantization()
    lease_s: float = _lease_s()
    kv_transport: KvTransport = _kv_transport()
    transfer_timeout_s: float = _option(
        60.0, "Seconds without progress after which a KV transfer is given up.", "Network", low=0.001
    )
    tensor_parallel_size: int = _option(
        1, "Ranks that share every layer of this node's model.", "Ranks", "--tp", low=1, high=64, own=True
    )
    nnodes: int = _option(1, "Hosts over which this node's ranks are spread.", "Ranks", low=1, high=64, own=True)
    node_rank: int = _option(0, "Which of them this is; 0 leads.", "Ranks", low=0, high=63, own=True)
    master_addr: str = _option("127.0.0.1", "Address of the leading host, for its other ranks.", "Ranks", own=True)
    master_port: int = _option(
        0, "Port there; 0 takes a free one, which works on one host only.", "Ranks", low=0, high=65535, own=True
    )
    rank_timeout_s: float = _option(
        120.0, "Seconds that ranks wait for each other; more than the longest step.", "Ranks", low=0.1
    )
    start_timeout_s: float = _option(
        600.0, "Seconds that a node may take to start, all its ranks together.", "Ranks", low=1, own=True
    )
    threads: int | None = _option(
        None, "Threads that compute; by default PyTorch's choice, all cores.", "Capacity", low=1
    )
    nice: int = _option(
        0, "Niceness to add to this process; needs no rights when positive.", "Capacity", low=-20, high=19
    )
    admin_port: int = _admin_port()
    admin_host: str = _admin_host()
    admin_token: str = _admin_token("there is no admin API")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(NodeConfig):
    """A node that computes prompts and relays their KV."""

    section: ClassVar[str] = "prefill"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(NodeConfig):
    """A node that generates: it receives KV and runs continuous batching."""

    section: ClassVar[str] = "decode"
    default_rows: ClassVar[tuple[int, int]] = DECODE_ROWS

    max_num_batched_tokens: int | None = _max_num_batched_tokens(*DECODE_ROWS)
    pipeline_parallel_size: int = _option(
        1,
        "Stages that this node's layers are split into, each of --tensor-parallel-size ranks.",
        "Ranks",
        "--pp",
        low=1,
        high=64,
        own=True,
    )
    pp_layers: str = _option(
        "", "Layers of each stage, as in 10,14; empty: even work, the head counted.", "Ranks", own=True
    )
    local_prefill_chunk: int = _option(
        64, "Prompt tokens that one step may prefill beside the running streams.", "Capacity", low=1
    )


@dataclass(frozen=True, kw_only=True)
class UpConfig(ServiceConfig):
    """A whole cluster on this machine. A field that a service has too is passed on to it."""

    section: ClassVar[str] = "up"

    model: str = _option(
        "demo", "Model folder or hub name; demo is the small model that comes along.", "Model", "--model-path"
    )
    served_model_name: str | None = _served_model_name()
    dtype: DtypeName = _dtype()
    load_format: LoadFormat = _load_format()
    seed: int = _seed()
    max_model_len: int | None = _max_model_len()
    routers: int = _option(
        1, "Routers to run, on consecutive ports, for a load balancer in front.", "Cluster", low=1, high=64
    )
    prefill: int = _option(1, "Prefill nodes to run.", "Cluster", low=0, high=64)
    decode: int = _option(1, "Decode nodes to run.", "Cluster", low=1, high=64)
    prefill_tp: int = _option(1, "Tensor-parallel ranks of each prefill node.", "Cluster", low=1, high=64)
    decode_tp: int = _option(1, "Tensor-parallel ranks of each stage of each decode node.", "Cluster", low=1, high=64)
    decode_pp: int = _option(1, "Pipeline stages of each decode node.", "Cluster", low=1, high=64)
    decode_pp_layers: str = _option("", "Layers of each of these stages, as in 10,14.", "Cluster")
    favor: Favor = _option(
        "balanced",
        "Who gets the processor when both want it: itl the running streams, ttft the new prompts.",
        "Cluster",
    )
    pid_file: str | None = _option(
        None, "Write what runs (name, role, pid, address) to this file as JSON, and keep it true.", "Cluster", own=True
    )
    start_timeout_s: float = _option(
        120.0,
        "Seconds that everything may take to be ready, and later a restarted process.",
        "Cluster",
        low=1,
        own=True,
    )
    host: str = _host()
    port: int = _option(
        8000,
        "Port of the HTTP API, of several routers the first one's; 0 takes any free ones.",
        "Network",
        low=0,
        high=65535,
        own=True,
    )
    redis_url: str | None = _option(
        None, "A Redis that runs already; by default one is started.", "Network", secret=True
    )
    kv_transport: KvTransport = _kv_transport()
    max_num_seqs: int = _max_num_seqs()
    kv_blocks: int | None = _kv_blocks()
    kv_memory_gb: float | None = _kv_memory_gb()
    device: DeviceName = _device()
    prefill_gpu_memory_utilization: float | None = _share_of_card("prefill")
    decode_gpu_memory_utilization: float | None = _share_of_card("decode")
    enforce_eager: bool = _enforce_eager()
    async_scheduling: bool | None = _async_scheduling()
    kv_cache_dtype: KvCacheDtype = _kv_cache_dtype()
    quantization: Quantization = _quantization()
    api_key: str = _api_key()
    chat_template: str | None = _chat_template()
    generation_config: GenerationConfig = _generation_config()
    request_timeout_s: float = _request_timeout_s()
    max_waiting: int = _max_waiting()
    max_queue_wait_s: float = _max_queue_wait_s()
    slo_ttft: float = _slo_ttft()
    slo_tpot: float = _slo_tpot()
    local_prefill_tokens: int | None = _local_prefill_tokens()
    policy: str = _policy()
    max_attempts: int = _max_attempts()
    admin_port: int = _option(
        0,
        "Port of the router's admin API, of several routers the first one's; 0 takes any free ones.",
        "Admin",
        low=0,
        high=65535,
        own=True,
    )
    admin_token: str = _admin_token("one is made, which `kvrelay admin` on this machine finds")
    index_blocks: int = _index_blocks()


SERVICES: tuple[type[ServiceConfig], ...] = (RouterConfig, PrefillConfig, DecodeConfig, UpConfig)


def field_infos(cls: type[ServiceConfig]) -> dict[str, FieldInfo]:
    """Each field's `FieldInfo`, in order of declaration."""
    return {f.name: f.metadata["info"] for f in dataclasses.fields(cls)}


def _check_bounds(name: str, value: Any, info: FieldInfo) -> None:
    if value is None or isinstance(value, str):
        return
    if not (value == value and abs(value) != float("inf")):
        raise ConfigError(f"{name} must be finite, not {value}")
    if info.low is not None and value < info.low:
        raise ConfigError(f"{name} must be at least {info.low:g}, not {value}")
    if info.high is not None and value > info.high:
        raise ConfigError(f"{name} must be at most {info.high:g}, not {value}")
