"""Opens a model that a class of transformers computes. Used by a rank's main thread while it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.model.generic import attention
from common.model.generic.describe import read_class
from common.model.generic.probe import build_on_meta


def build_class(path: Path, dtype: torch.dtype) -> Any:
    """The class's model in directory `path` without weights, whose attention is ours. Raises: ConfigError."""
    attention.register()
    return build_on_meta(*read_class(path), attention.NAME, dtype)
