"""A node's plan, derived from its configuration before any weight is read, and the objects made from it."""

from __future__ import annotations

import logging
import platform
import resource
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.base.counted import counted
from common.base.device import DeviceKind, default_dtype, gpu_name, rank_device, resolve_device
from common.base.errors import ConfigError
from common.config.fields import listed
from common.config.option_groups import Quantization
from common.config.service_configs import NodeConfig
from common.control.messages import Adapter, ModelInfo, NodeRecord, PeerRef, Role, SamplingParams
from common.engine.grammar.compiler import GrammarCompiled, GrammarCompiler
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.step import SampleSpec, StepInput
from common.kernels.native.find import arithmetic
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.model.choose import choose_model
from common.model.config import ModelConfig
from common.model.files import files_state
from common.model.fingerprint import fingerprint, tokenizer_digest
from common.model.formats.quantization import Fp8Quantization
from common.model.formats.quantization import Quantization as CheckpointQuantization
from common.model.hub import model_folder, model_name, resolve_model
from common.model.kv_spec import kv_spec
from common.model.sharding import check_parallel, lm_head_in_layers, split_layers
from common.parallel.mesh import RankPlace
from common.security.sealed_endpoints import without_keys

log = logging.getLogger(__name__)


def node_id_for(role: Role, config: NodeConfig) -> str:
    """The configured node id, or one that no other node has."""
    return config.node_id or f"{role}-{platform.node()}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class NodePlan:
    """Model, layout and device of a node, before any weight is read; equal on all of its ranks."""

    path: Path
    model_config: ModelConfig
    layout: KVLayout
    model: ModelInfo
    dtype: str
    """Data type of weights and activations; that of the KV cache is in the layout."""
    device: DeviceKind
    weights: str
    """State of the weight files (`files_state`) before the layout's fingerprint was made of them."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def place(self, rank: int) -> RankPlace:
        return RankPlace.of(rank, self.layout.tp_size, self.layout.pp_size)


def plan_node(config: NodeConfig, *, pp_size: int = 1, pp_layers: str = "") -> NodePlan:
    """Read the model's config and choose device, dtype, context and layout.

    Raises: ConfigError in one sentence for an impossible model, layout or device.
    """
    path = resolve_model(config.model)
    model_config = choose_model(path, config.model_impl)
    _check_quantization(config.quantization, model_config.quantization, path)
    max_model_len = model_config.fit_context(config.max_model_len)
    model_config = model_config.for_context(max_model_len)
    device = resolve_device(config.device)
    wanted = default_dtype(model_config.dtype, device) if config.dtype == "auto" else config.dtype
    dtype = model_config.resolve_dtype(wanted)
    explicit = _parse_layers(pp_layers)
    stages = split_layers(
        model_config.num_layers, len(explicit) or pp_size, explicit or None, lm_head_in_layers(model_config)
    )
    check_parallel(model_config, config.tensor_parallel_size, stages)
    drawn_on = gpu_name(rank_device(device, 0, 1)) if config.load_format == "dummy" else "cpu"
    weights = files_state(path, config.load_format)
    layout = KVLayout(
        fingerprint=fingerprint(
            path,
            model_config,
            config.load_format,
            dtype,
            config.seed,
            drawn_on,
            config.quantization,
            arithmetic() if device == "cpu" and dtype == "bfloat16" else "",
        ),
        spec=kv_spec(model_config, _kv_dtype(config.kv_cache_dtype, dtype)),
        tp_size=config.tensor_parallel_size,
        pp_layers=stages,
    )
    names = listed("served_model_name", config.served_model_name)
    name = names[0] if names else model_name(path)
    tokenizer = tokenizer_digest(path)
    if not tokenizer and config.load_format != "dummy":
        raise ConfigError(f"no tokenizer.json in {model_folder(path)}; routers need a fast tokenizer file there")
    info = ModelInfo(name, str(path), model_config.vocab_size, max_model_len, tokenizer)
    return NodePlan(path, model_config, layout, info, dtype, device, weights)


def _check_quantization(wanted: Quantization, stored: CheckpointQuantization | None, path: Path) -> None:
    """Raises: ConfigError where `--quantization` contradicts the checkpoint."""
    if wanted == "fp8" and not isinstance(stored, Fp8Quantization):
        raise ConfigError(f"--quantization fp8: {path / 'config.json'} says nothing of FP8 weights")
    if wanted in ("int8", "int4") and stored is not None:
        raise ConfigError(
            f"--quantization {wanted} needs floating-point weights, and {path} is quantized already: leave it out"
        )


def _kv_dtype(wanted: str, model_dtype: str) -> str:
    """`--kv-cache-dtype` as `KVSpec` names it."""
    if wanted == "auto":
        return model_dtype
    return "float8_e4m3" if wanted.startswith("fp8") else wanted


def batched_tokens(config: NodeConfig, plan: NodePlan) -> int:
    """`--max-num-batched-tokens`, which by default depends on the device."""
    default = config.step_tokens.on_cpu if plan.device == "cpu" else config.step_tokens.on_gpu
    return config.max_num_batched_tokens or default


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"pp_layers {text!r} is not a list of numbers such as 10,14") from error


def peak_memory_bytes() -> int:
    """Peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process of this machine; None if that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def fit_memory(plan: NodePlan, config: NodeConfig, num_blocks: int) -> NodePlan:
    """`plan` with its context limited to what `num_blocks` can hold, so that no accepted request is too long for the node.

    Raises: ConfigError if the operator asked for a longer one.
    """
    spec = plan.layout.spec
    longest = num_blocks // spec.num_tables * spec.block_size
    if plan.model.max_model_len <= longest:
        return plan
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs more than the {counted(num_blocks, 'KV block')} ({longest} tokens) "
            "that this node has room for: give it more --kv-memory-gb, or ask for less"
        )
    log.warning(
        "the model's context of %d tokens is reduced to %d, which KV memory can hold", plan.model.max_model_len, longest
    )
    return replace(plan, model=replace(plan.model, max_model_len=longest))


def make_record(
    role: Role,
    me: PeerRef,
    config: NodeConfig,
    plan: NodePlan,
    num_blocks: int,
    kernels: str,
    adapters: Sequence[Adapter] = (),
) -> NodeRecord:
    """The node's record in Redis, without the keys of its data sockets: every service can read it."""
    return NodeRecord(
        role,
        replace(me, data_addresses=[without_keys(address) for address in me.data_addresses]),
        plan.model,
        plan.layout,
        num_blocks // plan.layout.spec.num_tables,
        time.time(),
        max_num_seqs=config.max_num_seqs,
        kernels=kernels,
        adapters=list(adapters),
    )


def steps_ahead(config: NodeConfig, plan: NodePlan) -> int:
    """Steps in flight over the same sequences: 2 with asynchronous scheduling, else 1.

    A pipeline has a step of other sequences in flight for each of its stages, prepared while the others run.
    """
    wanted = plan.device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return 2 if wanted and plan.layout.pp_size == 1 else 1


def make_scheduler(config: NodeConfig, plan: NodePlan, num_blocks: int, *, prefill_chunk: int) -> Scheduler:
    """The scheduler of a node whose ranks hold `num_blocks`."""
    return Scheduler(
        SchedulerConfig(
            max_model_len=plan.model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched_tokens(config, plan),
            prefill_chunk=prefill_chunk,
            num_groups=plan.layout.pp_size,
            depth=steps_ahead(config, plan),
        ),
        BlockPool(num_blocks, plan.layout.spec.num_tables),
        plan.layout.spec.windows,
    )


def make_grammars(plan: NodePlan, post: Callable[[GrammarCompiled], None]) -> GrammarCompiler:
    """The grammars of a node. `post` hands over events, on any thread."""
    folder = model_folder(plan.path)
    return GrammarCompiler(folder, plan.model.vocab_size, plan.model_config.eos_token_ids, post)


def warm_up(num_tables: int = 1) -> StepInput:
    """One row through every layer, so that no client waits for the first access to weights and memory."""
    sample = SampleSpec(0, 0, SamplingParams(seed=0, max_tokens=1, temperature=0.0), position=1, num_generated=0)
    return StepInput(
        step_id=0,
        token_ids=[0],
        positions=[0],
        slot_mapping=[[0]] * num_tables,
        query_lens=[1],
        context_lens=[1],
        block_tables=[[[0]]] * num_tables,
        num_decode_seqs=1,
        samples=[sample],
    )
