"""One rank with its model loaded: the device it is on, how many KV blocks fit there, its KV memory and its runner.

Runs on the thread that starts the rank. On a GPU blocks are counted after a profile run (`common.node.profile_run`,
`common.node.kv_budget`), and a decode node captures its decode steps (`common.engine.cuda_graphs`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from common.attention.base import AttentionBackend
from common.attention.choose import choose_attention, worth_capturing
from common.base.device import rank_device, use_device
from common.base.errors import ConfigError
from common.base.sentences import counted
from common.engine.cuda_graphs import (
    CannotCapture,
    CudaGraphCapture,
    DecodeGraphs,
    StepCapture,
    graph_sizes,
)
from common.engine.runner import ModelRunner
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler
from common.engine.sampling.row_passes import NativePasses
from common.kernels.choose import describe_kernels
from common.kernels.library import find_flashinfer
from common.kernels.native.find import find_native
from common.kv.page_supply import PageSupply
from common.kv.storage import KVStorage
from common.model.files import files_state
from common.model.loader import load_model
from common.model.lora.adapters import Adapters
from common.model.mixture.rebalancer import Rebalancer
from common.model.packed_weights import PackedWeights, open_packed_weights
from common.model.rank_model import RankModel
from common.node.kv_budget import GpuMemoryUse, adapter_bytes, kv_blocks_on_gpu, staging_bytes
from common.node.plan import NodePlan
from common.node.profile_run import CudaMeter, Largest, profile_run
from common.parallel.mesh import SOLO, Mesh
from common.parallel.place import RankPlace

log = logging.getLogger(__name__)


class Worker:
    """One rank's shard of the model. `allocate_kv` sets `storage`, `page_supply` and `runner`; `capture_graphs` then captures its
    decode steps."""

    runner: ModelRunner
    storage: KVStorage

    def __init__(
        self,
        plan: NodePlan,
        mesh: Mesh,
        model: RankModel,
        *,
        meter: CudaMeter | None = None,
        graph_capture: StepCapture | None = None,
        packed: PackedWeights | None = None,
        draft: Worker | None = None,
    ) -> None:
        """`meter`: measures GPU memory, from which the number of KV blocks follows. `graph_capture`: for decode steps;
        None: they are not captured. `packed`: closed with the worker. `draft`: the node's draft model, if it is
        on this rank. All ranks of the node do this at the same time."""
        self.draft = draft
        self.num_blocks = 0
        """KV blocks, once they are allocated."""
        self._packed = packed
        self._graph_capture = graph_capture
        self.page_supply = PageSupply(0, [], 1, 0)
        self._spare_blocks = 0 if graph_capture is None else 1  # padding rows of captured steps write there
        self.device = model.device
        self.kernels = describe_kernels(model.device)
        self.plan = plan
        self.mesh = mesh
        self.place = mesh.place
        self.shard = plan.layout.rank_shard(mesh.place.rank)
        self._model = model
        self.rebalancer: Rebalancer | None = None
        if plan.experts.threshold is not None and model.expert_layers:
            self.rebalancer = Rebalancer(model.expert_layers, mesh, plan.experts.threshold)
        self.memory_use: GpuMemoryUse | None = None
        """Use of the GPU, without KV; None on a CPU."""
        self.block_bytes = per_block = plan.layout.shard_bytes_per_block(self.shard)
        if draft is not None:  # its one table has a block for each block of one table of the target
            per_block += -(-draft.block_bytes // plan.layout.spec.num_tables)
        self.max_blocks = (
            plan.kv_memory.blocks_on_cpu(per_block) if meter is None else self._blocks_on_gpu(meter, per_block)
        )
        """KV blocks that fit into this rank's memory."""
        if self.max_blocks < 2:
            raise ConfigError(
                f"{counted(self.max_blocks, 'KV block')} of {per_block} bytes: give the node more KV memory"
            )

    @property
    def adapters(self) -> Adapters:
        """LoRA adapters on this rank."""
        return self._model.adapters

    def _blocks_on_gpu(self, meter: CudaMeter, block_bytes: int) -> int:
        """The KV blocks that fit beside the largest step. Raises: ConfigError with the sizes, if the GPU has no room."""
        plan, limits = self.plan, self.plan.steps
        # The profile's steps go through all ranks, so all must have loaded.
        self.mesh.agree("weights", "loaded", plan.config.start_timeout_s)
        rows = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        largest = Largest(rows, limits.max_model_len, limits.max_num_seqs, plan.layout.spec.num_tables)
        kept = self._graph_capture is not None and self._graph_capture.keeps_memory
        use = profile_run(self._storage, self._runner, largest, meter, self._sizes_to_capture, graphs_kept=kept)
        folders = [Path(folder).expanduser() for folder in plan.lora_folders.values()]
        use = replace(
            use, staging=staging_bytes(plan.config.kv_transport), adapters=adapter_bytes(folders, plan.config.max_loras)
        )
        if self.draft is not None and self.draft.memory_use is not None:
            use = replace(use, draft=self.draft.memory_use.activations + self.draft.memory_use.graphs)
        self.memory_use = use
        log.info("%s: %s", self.place, use)
        return kv_blocks_on_gpu(use, plan.kv_memory, block_bytes, self._spare_blocks)

    def _sizes_to_capture(self, attention: AttentionBackend) -> list[int]:
        """Batch sizes of decode steps; empty where none are captured."""
        if self._graph_capture is None or not worth_capturing(attention, self.plan.model.max_model_len):
            return []
        return graph_sizes(self.plan.steps.max_num_seqs)

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate KV memory for `num_blocks`, the same on all ranks. Raises: ConfigError if it is not there."""
        self.num_blocks = num_blocks
        if self.draft is not None:
            self.draft.allocate_kv(num_blocks // self.plan.layout.spec.num_tables)
        self.storage = self._storage(num_blocks + self._spare_blocks)
        self.page_supply = self.storage.page_supply()
        self.runner, self._attention = self._runner(self.storage)

    def capture_graphs(self) -> None:
        """Capture decode steps as CUDA graphs, if this rank has a `StepCapture`. All ranks of the node do this at the
        same time.

        Steps of a model that cannot be captured stay as they are, with a warning in the log.
        Raises: ConfigError if capturing fails otherwise.
        """
        if self.draft is not None:
            self.draft.capture_graphs()
        if self._graph_capture is None:
            return
        if not self._sizes_to_capture(self._attention):
            log.warning(
                "decode steps are not captured as CUDA graphs: that would slow down attention on gathered KV blocks"
            )
            return
        layout, seqs = self.plan.layout, self.plan.steps.max_num_seqs
        pad_block = self.storage.num_blocks - 1
        use_device(self.device)
        try:
            graphs = DecodeGraphs(
                self._model,
                self._attention,
                max_num_seqs=seqs,
                pad_block=pad_block,
                block_size=layout.spec.block_size,
                num_tables=layout.spec.num_tables,
            )
            graphs.capture(self._graph_capture)
        except CannotCapture as error:
            log.warning("decode steps are not captured as CUDA graphs, which makes small ones slower: %s", error)
            return
        except RuntimeError as error:
            raise ConfigError(
                f"cannot capture decode steps as CUDA graphs ({error}): --enforce-eager runs without them"
            ) from error
        self.runner = self._model_runner(self.storage, self._attention, graphs)

    def _storage(self, num_blocks: int) -> KVStorage:
        try:
            layout, scales = self.plan.layout, self._model.kv_scales
            by_group = [tuple(scales[layer] for layer in layers) for layers in layout.group_layers(self.shard)]
            return KVStorage(layout, self.shard, num_blocks, str(self.device), by_group)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"no memory for {num_blocks} KV blocks on {self.device}: {_sentence(error)}") from error

    def _runner(self, storage: KVStorage) -> tuple[ModelRunner, AttentionBackend]:
        shapes = self._model.attention_shapes(self.plan.layout.spec.block_size, self.plan.model.max_model_len)
        attention = choose_attention(storage, shapes, self.mesh)
        return self._model_runner(storage, attention), attention

    def _model_runner(
        self, storage: KVStorage, attention: AttentionBackend, graphs: DecodeGraphs | None = None
    ) -> ModelRunner:
        overlaps = self.plan.steps.depth > 1
        if self.device.type == "cuda":
            sampler = DeviceSampler(find_flashinfer(self.device).flashinfer)
        else:
            native = find_native()
            sampler = HostSampler(None if native is None else NativePasses(native))
        pages = self.page_supply if self.device.type == "cpu" else None
        return ModelRunner(
            self._model, storage, attention, graphs, sampler, overlaps=overlaps, pages=pages, rebalancer=self.rebalancer
        )

    def close(self) -> None:
        """Release the packed weights: other processes may remove their files. A second call does nothing."""
        if self.draft is not None:
            self.draft.close()
        packed, self._packed = self._packed, None
        if packed is not None:
            packed.close()


def own_device(plan: NodePlan, place: RankPlace) -> torch.device:
    """The GPU of this rank, or the CPU. Raises: ConfigError if there are fewer GPUs than ranks."""
    ranks_here = len(plan.ranks_here)
    return rank_device(plan.device, place.rank % ranks_here, ranks_here)


def load_worker(plan: NodePlan, mesh: Mesh, *, small_batches: bool) -> Worker:
    """Load this rank's shard, and on the leader the node's draft model. Blocking, seconds to minutes.

    `small_batches`: make steps of few rows fast (a decode node), which may cost memory.
    Raises: ConfigError in one sentence for wrong weights or sizes.
    """
    if plan.draft is None or mesh.place.rank:
        return _load_worker(plan, mesh, small_batches)
    draft = load_worker(plan.draft, SOLO, small_batches=True)  # first, so that its memory is measured with the rest
    try:
        return _load_worker(plan, mesh, small_batches, draft)
    except BaseException:
        draft.close()
        raise


def _load_worker(plan: NodePlan, mesh: Mesh, small_batches: bool, draft: Worker | None = None) -> Worker:
    device = own_device(plan, mesh.place)
    use_device(device)
    packed = _packed_weights(plan, device)
    try:
        model = load_model(
            plan.path,
            plan.model_config,
            dtype=plan.dtype,
            load_format=plan.config.load_format,
            seed=plan.config.seed,
            small_batches=small_batches,
            mesh=mesh,
            pp_layers=plan.layout.pp_layers if plan.model_config.draft_head is None else (),  # its KV has more layers
            device=device,
            quantization=plan.quantization,
            packed=packed,
            redundant_experts=plan.experts.redundant_slots,
        )
        if not _is_current(plan):
            raise ConfigError(
                f"the weight files of {plan.path} were changed while they were read; start the node again"
            )
        if device.type == "cpu":
            return Worker(plan, mesh, model, packed=packed, draft=draft)
        capture = StepCapture() if plan.config.enforce_eager else CudaGraphCapture(device)
        place = mesh.place
        is_plain = place.cp_size == 1 and not place.is_data_parallel
        can_capture = is_plain and model.draft_head is None  # a head reads what the model computes
        capture = capture if small_batches and can_capture else None
        if model.draft_head is not None and small_batches and not plan.config.enforce_eager:
            log.warning("decode steps are not captured as CUDA graphs: the draft head reads what is between the layers")
        return Worker(plan, mesh, model, meter=CudaMeter(device), graph_capture=capture, draft=draft)
    except BaseException as error:
        if packed is not None:
            packed.close()
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(f"the model does not fit on {device}: {_sentence(error)}") from error


def _packed_weights(plan: NodePlan, device: torch.device) -> PackedWeights | None:
    """The native kernels' weights that are shared with other processes; None without these kernels."""
    if device.type != "cpu" or find_native() is None:
        return None
    state, limit_gb = plan.weights_state, plan.config.packed_cache_gb
    return open_packed_weights(plan.layout.fingerprint, state, limit_gb, lambda: _is_current(plan), plan.model.name)


def _is_current(plan: NodePlan) -> bool:
    """Whether the weight files are those that the plan was made for. Raises: ConfigError."""
    return files_state(plan.path, plan.config.load_format) == plan.weights_state


def _sentence(error: BaseException) -> str:
    """The first line of PyTorch's message, without the advice that follows."""
    return str(error).partition("\n")[0]
