"""Loads a rank's part of a model, with progress reports. Runs on a rank's main thread."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from common.base.device import CPU
from common.base.errors import ConfigError
from common.base.free_memory import release_free_memory
from common.config.option_groups import LoadFormat, Quantization
from common.kernels.choose import choose_kernels
from common.kernels.native.find import find_native
from common.model.build import Build
from common.model.config import ModelConfig
from common.model.decoder import DecoderModel
from common.model.formats.on_the_fly import weight_bits
from common.model.generic.config import GenericConfig
from common.model.hub import is_gguf, model_name
from common.model.packed_weights import PackedWeights
from common.model.precision import Precision
from common.model.rank_model import OnProgress, RankModel
from common.model.sharding import check_parallel
from common.model.weights import CheckpointWeights, DummyWeights, WeightSource
from common.parallel.mesh import SOLO, Mesh

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 3.0


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: str,
    load_format: LoadFormat,
    seed: int,
    small_batches: bool,
    mesh: Mesh = SOLO,
    pp_layers: tuple[int, ...] = (),
    device: torch.device = CPU,
    quantization: Quantization = "auto",
    packed: PackedWeights | None = None,
    lm_head: bool = True,
    redundant_experts: int | None = None,
) -> RankModel:
    """Build this rank's part of the model of `config`, with the weights in `path` or random ones (format "dummy").

    `dtype` "auto" means that of the files. `small_batches` False leaves out what only single-row steps need
    (see `common.model.precision`). Weights are kept on `device`. `pp_layers`: layers per pipeline stage, empty for one
    stage. `quantization` "int8" or "int4" quantizes weights that are stored as floating-point numbers.
    `packed` shares packed weights with other processes. Without `lm_head` the model of a native family has no logits.
    `redundant_experts`: slots of each mixture beside one for each expert; None: experts never move.
    All ranks of `mesh` load at the same time, with the same arguments; each reads only the bytes of its own part.

    Raises: ConfigError for missing, corrupt or misshapen tensors, for a layout that the model
    cannot be split into and for ranks that would compute in different dtypes; RankLost.
    """
    check_parallel(config, mesh.place.layer_tp_size, pp_layers)
    if mesh.place.pp_size != max(1, len(pp_layers)):
        raise ConfigError(f"pipeline split {list(pp_layers)} does not have {mesh.place.pp_size} stages")
    is_generic = isinstance(config, GenericConfig)
    has_native_kernels = device.type == "cpu" and find_native() is not None
    precision = Precision.choose(
        config.resolve_dtype(dtype),
        small_batches=small_batches and not is_generic,
        device=device,
        has_native_kernels=has_native_kernels,
    )
    # Hosts may differ in the dtypes that they choose, and a stage expects hidden states of one dtype.
    mesh.agree("dtypes of single rows and of batches", f"{precision.narrow} and {precision.wide}")
    kernels = choose_kernels(device, precision.wide)
    started = time.monotonic()

    def build(weights: WeightSource) -> Build:
        bits = weight_bits(quantization)
        return Build(
            config, weights, precision, mesh, pp_layers, device, kernels, bits, packed, lm_head, redundant_experts
        )

    with torch.inference_mode(), _progress(f"loading {config.architecture}") as on_progress:
        if is_generic:
            model = _load_generic(path, load_format, seed, build, precision.wide, on_progress)
        else:
            model = DecoderModel(build(_open_weights(path, config, load_format, seed, device)), on_progress)
    release_free_memory()
    log.info("loaded %s from %s in %.1f s", config.architecture, model_name(path), time.monotonic() - started)
    return model


def _load_generic(
    path: Path,
    load_format: LoadFormat,
    seed: int,
    build: Callable[[WeightSource], Build],
    dtype: torch.dtype,
    on_progress: OnProgress,
) -> RankModel:
    # Imported here because it brings the library transformers, which other models do not need.
    from common.model.generic.checkpoint import GenericCheckpoint
    from common.model.generic.model import GenericModel, build_class

    causal = build_class(path, dtype)
    dummy = load_format == "dummy"
    made = build(DummyWeights(seed) if dummy else GenericCheckpoint(path, causal))
    return GenericModel(made, causal, on_progress)


def _open_weights(
    path: Path, config: ModelConfig, load_format: LoadFormat, seed: int, device: torch.device
) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights(seed, device)
    if is_gguf(path):
        # Imported here because it costs a fifth of a second, which other models need not pay.
        from common.model.gguf.file import open_gguf
        from common.model.gguf.weights import GgufWeights

        return GgufWeights(open_gguf(path), config.layers[0].attention, device)
    return CheckpointWeights(path, config.quantization, device, config.weight_names.other_beginnings)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Report on a terminal with a bar, elsewhere with a log line every few seconds."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    reported = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _REPORT_EVERY_S:
            reported = time.monotonic()
            log.info("%s: %d %%", what, 100 * done // total)

    yield report
