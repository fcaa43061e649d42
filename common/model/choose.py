"""Chooses what computes a model's layers: a native family, or a class of the library transformers.

Used by nodes at their start. No torch at import time.
"""

from __future__ import annotations

import logging
from pathlib import Path

from common.base.errors import ConfigError
from common.config.option_groups import ModelImpl
from common.model.config import ModelConfig, UnknownArchitecture, load_model_config
from common.model.generic.library import INSTALL, is_installed

log = logging.getLogger(__name__)


def choose_model(path: Path, implementation: ModelImpl) -> ModelConfig:
    """The config of the model in directory or GGUF file `path`, for `--model-impl`; a log line says what computes it.

    Raises: ConfigError, one sentence, if nothing can.
    """
    found = _find_native(path, implementation)
    if isinstance(found, ModelConfig):
        log.info("model implementation: native (%s)", found.architecture)
        return found
    why = (
        "--model-impl transformers"
        if found is None
        else f"no native family has its architecture ({found.architecture})"
    )
    # Imported here because it brings torch and transformers, which native models do not need for their config.
    from common.model.generic.describe import describe

    generic = describe(path)
    log.info("model implementation: transformers (%s): %s", generic.architecture, why)
    return generic


def check_model(path: Path, implementation: ModelImpl) -> None:
    """Check what can be checked of a model before torch is imported. Raises: ConfigError."""
    found = _find_native(path, implementation)
    if not isinstance(found, ModelConfig) and not is_installed():
        why = "--model-impl transformers needs a library" if found is None else found.message
        raise ConfigError(f"{why}; {INSTALL}")


def _find_native(path: Path, implementation: ModelImpl) -> ModelConfig | UnknownArchitecture | None:
    """The config by a native family, or the error if none has the architecture and transformers may take its place. None:
    `implementation` asks for transformers.

    Raises: ConfigError.
    """
    if implementation == "transformers":
        return None
    try:
        return load_model_config(path)
    except UnknownArchitecture as error:
        if implementation == "native":
            raise
        return error
