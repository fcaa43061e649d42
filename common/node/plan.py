"""A node's plan: its model, layout, device and limits, derived from its configuration before any weight is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from common.base.device import DeviceKind, default_dtype, gpu_name, rank_device, resolve_device
from common.base.errors import ConfigError
from common.base.sentences import counted
from common.cluster.address import HostAddresses
from common.config.fields import listed
from common.config.option_groups import Quantization
from common.config.service_configs import NodeConfig
from common.config.speculation import Speculation
from common.control.messages import ModelInfo
from common.engine.scheduler_config import SchedulerConfig
from common.kernels.native.find import arithmetic
from common.kv.rank_layout import KVLayout
from common.model.choose import choose_model
from common.model.config import ModelConfig
from common.model.files import files_state
from common.model.fingerprint import fingerprint, tokenizer_digest
from common.model.formats.quantization import Fp8Quantization
from common.model.formats.quantization import Quantization as CheckpointQuantization
from common.model.hub import model_name, resolve_model
from common.model.kv_spec import kv_spec
from common.model.sharding import check_parallel, lm_head_in_layers, split_layers
from common.model.tokenizer_folder import tokenizer_folder
from common.node.head_plan import with_draft_head
from common.node.kv_budget import KvMemoryRequest
from common.node.options import ExpertSettings, check_data_parallel, lora_folders, ranks_of_host, share_cores
from common.parallel.place import RankPlace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodePlan:
    """Everything that a node's ranks need to know, before any weight is read; equal on all ranks of a host."""

    config: NodeConfig
    """`threads` is that of each rank on this host."""
    addresses: HostAddresses
    ranks_here: range
    """The ranks that run on this host."""
    path: Path
    tokenizer: Path
    """The folder that holds the tokenizer's files."""
    model_config: ModelConfig
    layout: KVLayout
    model: ModelInfo
    names: frozenset[str]
    """All names of the model in the API."""
    device: DeviceKind
    dtype: str
    """Data type of weights and activations; that of the KV cache is in the layout."""
    quantization: Quantization
    weights_state: str
    """State of the weight files (`files_state`) before the fingerprint was made of them."""
    kv_memory: KvMemoryRequest
    steps: SchedulerConfig
    lora_folders: dict[str, str]
    """Folder of each configured adapter, by its name."""
    experts: ExpertSettings
    speculation: Speculation | None = None
    """How drafts are made; None: only those that grammars force."""
    draft: NodePlan | None = None
    """The draft model on the leader, if drafts come from one: `common.node.draft_plan`."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def is_on_one_host(self) -> bool:
        """All ranks of the node are on this host."""
        return self.config.nnodes == 1

    def place(self, rank: int) -> RankPlace:
        layout = self.layout
        is_data_parallel = layout.dp_size > 1
        return RankPlace.of(rank, layout.tp_size * layout.dp_size, layout.pp_size, layout.cp_size, is_data_parallel)


def plan_node(
    config: NodeConfig,
    *,
    pp_size: int = 1,
    pp_layers: str = "",
    prefill_chunk: int | None = None,
    speculation: Speculation | None = None,
) -> NodePlan:
    """Read the model's config and choose device, dtype, context, layout and limits.

    `prefill_chunk`: prompt tokens of a step in which others decode; None: as many as a step computes.
    Raises: ConfigError in one sentence for an impossible model, layout or device.
    """
    path = resolve_model(config.model)
    num_stages = len(_parse_layers(pp_layers)) or pp_size
    model_config = _model_config(config, path, num_stages, speculation)
    max_model_len = model_config.fit_context(config.max_model_len)
    model_config = model_config.for_context(max_model_len)
    device = resolve_device(config.device)
    wanted = default_dtype(model_config.dtype, device) if config.dtype == "auto" else config.dtype
    dtype = model_config.resolve_dtype(wanted)
    weights_state = files_state(path, config.load_format)
    folder = tokenizer_folder(path, config.tokenizer)
    tokenizer = tokenizer_digest(folder)
    if not tokenizer and config.load_format != "dummy":
        raise ConfigError(f"no tokenizer.json in {folder}; routers need a fast tokenizer file there")
    layout = _layout(config, path, model_config, dtype, device, pp_size, _parse_layers(pp_layers), tokenizer)
    names = listed("served_model_name", config.served_model_name)
    name = names[0] if names else model_name(path)
    ranks_here = ranks_of_host(config, layout.world_size)
    memory_bytes = None if config.kv_memory_gb is None else int(config.kv_memory_gb * 2**30)
    return NodePlan(
        config=share_cores(config, len(ranks_here)),
        addresses=HostAddresses.of(config),
        ranks_here=ranks_here,
        path=path,
        tokenizer=folder,
        model_config=model_config,
        layout=layout,
        model=ModelInfo(name, str(path), model_config.vocab_size, max_model_len, tokenizer),
        names=frozenset({name, *names}),
        device=device,
        dtype=dtype,
        quantization=config.quantization,
        weights_state=weights_state,
        kv_memory=KvMemoryRequest(config.gpu_memory_utilization, memory_bytes, config.kv_blocks),
        steps=step_limits(config, device, layout.pp_size, max_model_len, prefill_chunk),
        lora_folders=lora_folders(config),
        experts=ExpertSettings.of(config, model_config),
        speculation=speculation,
    )


def _model_config(config: NodeConfig, path: Path, num_stages: int, speculation: Speculation | None) -> ModelConfig:
    """The model in `path`, with its draft head if that makes drafts. Raises: ConfigError for what the node cannot do with it."""
    model = choose_model(path, config.model_impl)
    _check_quantization(config.quantization, model.quantization, path)
    check_data_parallel(config, model)
    return with_draft_head(model, path, speculation, config, num_stages)


def _layout(
    config: NodeConfig,
    path: Path,
    model_config: ModelConfig,
    dtype: str,
    device: DeviceKind,
    pp_size: int,
    pp_layers: tuple[int, ...],
    tokenizer: str,
) -> KVLayout:
    """Which rank has which layers and KV heads. Raises: ConfigError for an impossible split."""
    stages = split_layers(
        model_config.num_layers, len(pp_layers) or pp_size, pp_layers or None, lm_head_in_layers(model_config)
    )
    dp_size = config.tensor_parallel_size if config.data_parallel_attention else 1
    tp_size = config.tensor_parallel_size // dp_size
    check_parallel(model_config, tp_size, stages)
    spec = kv_spec(model_config, _kv_dtype(config.kv_cache_dtype, dtype), dtype)
    drawn_on = gpu_name(rank_device(device, 0, 1)) if config.load_format == "dummy" else "cpu"
    return KVLayout(
        fingerprint=fingerprint(
            path,
            model_config,
            config.load_format,
            dtype,
            config.seed,
            drawn_on,
            config.quantization,
            arithmetic() if device == "cpu" and dtype == "bfloat16" else "",
            tokenizer,
        ),
        spec=spec,
        tp_size=tp_size,
        pp_layers=stages if model_config.draft_head is None else (spec.num_layers,),
        cp_size=config.context_parallel,
        hands_on=True,
        dp_size=dp_size,
    )


def step_limits(
    config: NodeConfig, device: DeviceKind, num_stages: int, max_model_len: int, prefill_chunk: int | None
) -> SchedulerConfig:
    """Limits of steps; that of tokens depends on the device unless it is configured.

    With asynchronous scheduling two steps are in flight over the same sequences. A pipeline has a step of other sequences in
    flight for each of its stages, prepared while the others run.
    """
    tokens = config.max_num_batched_tokens or (
        config.step_tokens.on_cpu if device == "cpu" else config.step_tokens.on_gpu
    )
    asynchronous = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=tokens,
        prefill_chunk=prefill_chunk or tokens,
        num_microbatches=num_stages,
        depth=2 if asynchronous and num_stages == 1 else 1,
    )


def _check_quantization(wanted: Quantization, stored: CheckpointQuantization | None, path: Path) -> None:
    """Compare `--quantization` with the checkpoint. Raises: ConfigError if they contradict each other."""
    if wanted == "fp8" and not isinstance(stored, Fp8Quantization):
        raise ConfigError(f"--quantization fp8: {path / 'config.json'} does not mention FP8 weights")
    if wanted in ("int8", "int4") and stored is not None:
        raise ConfigError(
            f"--quantization {wanted} needs floating-point weights, and {path} is quantized already: leave it out"
        )


def _kv_dtype(wanted: str, model_dtype: str) -> str:
    """Convert `--kv-cache-dtype` to the name that `KVSpec` uses."""
    if wanted == "auto":
        return model_dtype
    return "float8_e4m3" if wanted.startswith("fp8") else wanted


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"pp_layers {text!r} is not a list of numbers such as 10,14") from error


def fit_memory(plan: NodePlan, num_blocks: int) -> NodePlan:
    """`plan` with its context limited to what `num_blocks` can hold, so that no accepted request is too long for the node.

    Raises: ConfigError if the operator asked for a longer context.
    """
    longest = plan.layout.longest_sequence(num_blocks)
    if plan.model.max_model_len <= longest:
        return plan
    if plan.config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {plan.model.max_model_len} needs more than the {counted(num_blocks, 'KV block')} ({longest} tokens) "
            "that this node has room for: give it more --kv-memory-gb, or ask for less"
        )
    log.warning(
        "the model's context of %d tokens is reduced to %d, which fit in KV memory", plan.model.max_model_len, longest
    )
    return replace(
        plan, model=replace(plan.model, max_model_len=longest), steps=replace(plan.steps, max_model_len=longest)
    )
