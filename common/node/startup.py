"""From a node's configuration to a loaded model, its KV memory and its scheduler: the same for both roles and all ranks."""

from __future__ import annotations

import logging
import platform
import resource
import secrets
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.attention.base import AttentionBackend, AttentionShape
from common.attention.choose import choose_attention, worth_recording
from common.config import NodeConfig
from common.device import DeviceKind, card_name, default_dtype, rank_device, resolve_device, use_device
from common.engine.device_sampler import DeviceSampler
from common.engine.draws import HostSampler
from common.engine.graphs import CudaRecorder, DecodeGraphs, EagerRecorder, Recorder, graph_sizes
from common.engine.runner import ModelRunner
from common.engine.scheduler import Scheduler, SchedulerConfig
from common.engine.step import SampleSpec, StepInput
from common.errors import ConfigError
from common.kernels.library import find_flashinfer
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool
from common.kv.storage import KVStorage
from common.model.config import ModelConfig, load_model_config, resolve_model
from common.model.decoder import DecoderModel
from common.model.fingerprint import fingerprint
from common.model.loader import load_model
from common.node.memory import KvWish, kv_blocks_on_card
from common.node.profile_run import CudaMeter, Largest, MemoryMeter, profile_run
from common.parallel.mesh import Mesh, RankPlace
from common.parallel.split import check_parallel, head_layers, split_layers
from common.protocol import ModelInfo, NodeRecord, PeerRef, Role, SamplingParams

log = logging.getLogger(__name__)


def node_id_for(role: Role, config: NodeConfig) -> str:
    """The configured node id, or one that no other node has."""
    return config.node_id or f"{role}-{platform.node()}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Blueprint:
    """What a node will be, before any weight is read; equal on all of its ranks."""

    path: Path
    model_config: ModelConfig
    layout: KVLayout
    model: ModelInfo
    dtype: str
    """Of weights and activations; that of the KV cache is the layout's."""
    device: DeviceKind

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def place(self, rank: int) -> RankPlace:
        return RankPlace.of(rank, self.layout.tp_size, self.layout.pp_size)


def plan_node(config: NodeConfig, *, pp_size: int = 1, pp_layers: str = "") -> Blueprint:
    """Read the model's config and settle device, dtype, context and layout.

    Raises: ConfigError in one sentence for a model, a layout or a device that cannot be.
    """
    path = resolve_model(config.model)
    model_config = load_model_config(path)
    if config.quantization == "fp8" and model_config.quantization is None:
        raise ConfigError(f"--quantization fp8: {path / 'config.json'} says nothing of FP8 weights")
    device = resolve_device(config.device)
    wanted = default_dtype(model_config.dtype, device) if config.dtype == "auto" else config.dtype
    dtype = model_config.resolve_dtype(wanted)
    explicit = _parse_layers(pp_layers)
    stages = split_layers(
        model_config.num_layers, len(explicit) or pp_size, explicit or None, head_layers(model_config)
    )
    check_parallel(model_config, config.tensor_parallel_size, stages)
    drawn_on = card_name(rank_device(device, 0, 1))
    layout = KVLayout(
        fingerprint=fingerprint(path, model_config, config.load_format, dtype, config.seed, drawn_on),
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=_kv_dtype(config.kv_cache_dtype, dtype),
        tp_size=config.tensor_parallel_size,
        pp_layers=stages,
    )
    name = config.served_model_name or (config.model if config.model == "demo" else path.name)
    max_model_len = model_config.fit_context(config.max_model_len)
    info = ModelInfo(name, str(path), model_config.vocab_size, max_model_len)
    return Blueprint(path, model_config, layout, info, dtype, device)


def _kv_dtype(wanted: str, model_dtype: str) -> str:
    """`--kv-cache-dtype` as `KVLayout` names it."""
    if wanted == "auto":
        return model_dtype
    return "float8_e4m3" if wanted.startswith("fp8") else wanted


def batched_tokens(config: NodeConfig, blueprint: Blueprint) -> int:
    """`--max-num-batched-tokens`, which by default depends on the device."""
    on_cpu, on_card = config.default_rows
    return config.max_num_batched_tokens or (on_cpu if blueprint.device == "cpu" else on_card)


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"pp_layers {text!r} is not a list of numbers such as 10,14") from error


_CPU_KV_GB = 1.0
"""Memory for a rank's KV on a CPU where nobody says how much."""


class LoadedRank:
    """One rank's shard of the model. `lay_out` gives it KV memory, from then on `runner` and `storage` are there;
    `record` then readies its decode steps."""

    runner: ModelRunner
    storage: KVStorage

    def __init__(
        self,
        blueprint: Blueprint,
        config: NodeConfig,
        mesh: Mesh,
        model: DecoderModel,
        *,
        meter: MemoryMeter | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`meter`: of a card's memory, from which KV blocks are counted there. `recorder`: for decode steps; None
        leaves them unrecorded. All ranks of the node do this at the same time."""
        self._recorder = recorder
        self._spare_blocks = 0 if recorder is None else 1  # what rows that pad a recorded step write to
        self.device = model.device
        self.blueprint = blueprint
        self.config = config
        self.mesh = mesh
        self.place = mesh.place
        self.shard = blueprint.layout.shard(mesh.place.tp_rank, mesh.place.pp_rank)
        self._model = model
        per_block = (
            blueprint.layout.slice_bytes_per_block
            * (self.shard.layer_hi - self.shard.layer_lo)
            * (self.shard.head_hi - self.shard.head_lo)
        )
        kv_bytes = int((config.kv_memory_gb or _CPU_KV_GB) * 2**30)
        blocks = config.kv_blocks or kv_bytes // per_block
        self.max_blocks = blocks if meter is None else self._blocks_on_card(meter, per_block)
        """KV blocks that fit into this rank's memory."""
        if self.max_blocks < 2:
            raise ConfigError(f"{self.max_blocks} KV blocks of {per_block} bytes: give the node more KV memory")

    @property
    def samples(self) -> bool:
        """Whether this rank draws the tokens."""
        return self.place.is_last_stage and self.place.tp_rank == 0

    def _blocks_on_card(self, meter: MemoryMeter, block_bytes: int) -> int:
        """Raises: ConfigError with the sizes, if the card has no room."""
        config = self.config
        # The profile's steps go through all ranks, so all must have loaded.
        self.mesh.agree("weights", "loaded", config.start_timeout_s)
        rows = max(batched_tokens(config, self.blueprint), config.max_num_seqs)
        largest = Largest(rows, self.blueprint.model.max_model_len, config.max_num_seqs)
        sizes = [] if self._recorder is None else graph_sizes(config.max_num_seqs)
        use = profile_run(self._storage, self._runner, largest, meter, sizes)
        log.info("%s: %s", self.place, use)
        memory = None if config.kv_memory_gb is None else int(config.kv_memory_gb * 2**30)
        wish = KvWish(config.gpu_memory_utilization, memory, config.kv_blocks)
        return kv_blocks_on_card(use, wish, block_bytes, self._spare_blocks)

    def lay_out(self, num_blocks: int) -> None:
        """Allocate KV memory for `num_blocks`, the same on all ranks. Raises: ConfigError if it is not there."""
        self.storage = self._storage(num_blocks + self._spare_blocks)
        self.runner, self._attention = self._runner(self.storage)

    def record(self) -> None:
        """Record decode steps, if this rank is to. All ranks of the node do this at the same time.

        Raises: ConfigError if that fails.
        """
        if self._recorder is None:
            return
        if not worth_recording(self._attention, self.blueprint.model.max_model_len):
            log.warning("decode steps are not recorded: attention on gathered pages is slower so")
            return
        layout, seqs = self.blueprint.layout, self.config.max_num_seqs
        pad_block = self.storage.num_blocks - 1
        use_device(self.device)
        try:
            graphs = DecodeGraphs(
                self._model, self._attention, max_num_seqs=seqs, pad_block=pad_block, block_size=layout.block_size
            )
            graphs.record(self._recorder)
        except RuntimeError as error:
            raise ConfigError(f"cannot record decode steps ({error}): --enforce-eager does without") from error
        self.runner = self._model_runner(self.storage, self._attention, graphs)

    def _storage(self, num_blocks: int) -> KVStorage:
        try:
            scales = self._model.kv_scales
            return KVStorage(self.blueprint.layout, self.shard, num_blocks, str(self.device), scales)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"no memory for {num_blocks} KV blocks on {self.device}: {_sentence(error)}") from error

    def _runner(self, storage: KVStorage) -> tuple[ModelRunner, AttentionBackend]:
        config = self.blueprint.model_config
        shape = AttentionShape(
            num_q_heads=config.num_q_heads // self.place.tp_size,
            num_kv_heads=self.shard.head_hi - self.shard.head_lo,
            head_dim=config.head_dim,
            dtype=self._model.precision.wide,
            block_size=self.blueprint.layout.block_size,
            max_context=self.blueprint.model.max_model_len,
        )
        attention = choose_attention(storage, shape)
        return self._model_runner(storage, attention), attention

    def _model_runner(
        self, storage: KVStorage, attention: AttentionBackend, graphs: DecodeGraphs | None = None
    ) -> ModelRunner:
        carries = steps_ahead(self.config, self.blueprint) > 1
        on_card = self.device.type == "cuda"
        sampler = DeviceSampler(find_flashinfer(self.device).flashinfer) if on_card else HostSampler()
        return ModelRunner(self._model, storage, attention, graphs, sampler, carries=carries)

    def describe(self, peak_bytes: int) -> str:
        """For the log: what this rank got."""
        return (
            f"{self.place}: {peak_bytes / 1e9:.2f} GB at its peak while loading, room for {self.max_blocks} KV blocks"
        )


def own_device(blueprint: Blueprint, config: NodeConfig, place: RankPlace) -> torch.device:
    """The card of this rank, or the CPU. Raises: ConfigError if there are fewer cards than ranks."""
    ranks_here = blueprint.world_size // config.nnodes
    return rank_device(blueprint.device, place.rank % ranks_here, ranks_here)


def load_rank(blueprint: Blueprint, config: NodeConfig, mesh: Mesh, *, small_batches: bool) -> LoadedRank:
    """Load this rank's shard. Blocking, seconds to minutes.

    `small_batches`: whether steps of few rows matter here (a decode node), which may cost memory.
    Raises: ConfigError in one sentence for whatever is wrong with the weights or the sizes.
    """
    device = own_device(blueprint, config, mesh.place)
    use_device(device)
    try:
        model = load_model(
            blueprint.path,
            blueprint.model_config,
            dtype=blueprint.dtype,
            load_format=config.load_format,
            seed=config.seed,
            small_batches=small_batches,
            mesh=mesh,
            pp_layers=blueprint.layout.pp_layers,
            device=device,
        )
        if device.type == "cpu":
            return LoadedRank(blueprint, config, mesh, model)
        recorder = EagerRecorder() if config.enforce_eager else CudaRecorder(device)
        recorder = recorder if small_batches else None
        return LoadedRank(blueprint, config, mesh, model, meter=CudaMeter(device), recorder=recorder)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model does not fit on {device}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """The first line of what PyTorch says, which goes on with advice."""
    return str(error).partition("\n")[0]


def peak_memory_bytes() -> int:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(pid: int) -> int | None:
    """Memory that a process of this machine has now; None where that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def fit_memory(blueprint: Blueprint, config: NodeConfig, num_blocks: int) -> Blueprint:
    """`blueprint` with a context that `num_blocks` can hold: no request that the node lets in can be too long for it.

    Raises: ConfigError if the operator asked for a longer one.
    """
    longest = num_blocks * blueprint.layout.block_size
    if blueprint.model.max_model_len <= longest:
        return blueprint
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs more than the {num_blocks} KV blocks ({longest} tokens) that "
            "this node has room for: give it more --kv-memory-gb, or ask for less"
        )
    log.warning(
        "the model's context of %d tokens is cut to the %d that KV memory holds", blueprint.model.max_model_len, longest
    )
    return replace(blueprint, model=replace(blueprint.model, max_model_len=longest))


def make_record(role: Role, me: PeerRef, config: NodeConfig, blueprint: Blueprint, num_blocks: int) -> NodeRecord:
    """What the node says about itself in the membership."""
    return NodeRecord(
        role, me, blueprint.model, blueprint.layout, num_blocks, time.time(), max_num_seqs=config.max_num_seqs
    )


def steps_ahead(config: NodeConfig, blueprint: Blueprint) -> int:
    """Steps in flight over the same sequences: 2 with asynchronous scheduling, else 1.

    A pipeline has a step of other sequences in flight for each of its stages, prepared while the others run.
    """
    wanted = blueprint.device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return 2 if wanted and blueprint.layout.pp_size == 1 else 1


def make_scheduler(config: NodeConfig, blueprint: Blueprint, num_blocks: int, *, prefill_chunk: int) -> Scheduler:
    """The scheduler of a node whose ranks hold `num_blocks`."""
    return Scheduler(
        SchedulerConfig(
            max_model_len=blueprint.model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched_tokens(config, blueprint),
            prefill_chunk=prefill_chunk,
            num_groups=blueprint.layout.pp_size,
            depth=steps_ahead(config, blueprint),
        ),
        BlockPool(num_blocks),
    )


WARM_UP = StepInput(
    step_id=0,
    token_ids=[0],
    positions=[0],
    slot_mapping=[0],
    query_lens=[1],
    context_lens=[1],
    block_tables=[[0]],
    samples=[SampleSpec(0, SamplingParams(seed=0, max_tokens=1, temperature=0.0), position=1, num_generated=0)],
)
"""One row through every layer: the first touch of weights and memory is not some client's to wait for."""
