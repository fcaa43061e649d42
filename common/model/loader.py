"""From a model directory to a model ready to run, with progress on long loads. Runs on a rank's main thread."""

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

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.decoder import DecoderModel
from common.model.layers import Build
from common.model.precision import Precision
from common.model.registry import MODELS
from common.model.weights import CheckpointWeights, DummyWeights

log = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")
_REPORT_EVERY_S = 3.0


def load_model(
    path: Path, config: ModelConfig, *, dtype: str, load_format: str, seed: int, small_batches: bool
) -> DecoderModel:
    """Build the model of `config` with the weights in `path`, or with random ones for load format "dummy".

    `dtype` "auto" takes the files' own. `small_batches` False leaves out what only single-row steps need
    (see `common.model.precision`).
    Raises: ConfigError for missing, corrupt or misshapen tensors and for unknown options.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"unknown load format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    precision = Precision.choose(config.resolve_dtype(dtype), small_batches=small_batches)
    weights = DummyWeights(seed) if load_format == "dummy" else CheckpointWeights(path)
    started = time.monotonic()
    with torch.inference_mode(), _progress(f"loading {config.architecture}") as on_progress:
        model = MODELS[config.architecture](Build(config, weights, precision), on_progress)
    log.info("loaded %s from %s in %.1f s", config.architecture, path.name, time.monotonic() - started)
    return model


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
