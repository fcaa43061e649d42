"""Imports the library transformers, which only models without native implementation need (the extra `kvrelay[models]`)."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from common.base.errors import ConfigError

INSTALL = "pip install 'kvrelay[models]' brings the library transformers, which runs more architectures"


def is_installed() -> bool:
    """Whether the library is there; it is not imported."""
    return importlib.util.find_spec("transformers") is not None


def load(module: str = "transformers") -> ModuleType:
    """A module of the library. Takes seconds the first time. Raises: ConfigError if it is missing or does not import."""
    if not is_installed():
        raise ConfigError(f"the library transformers is not installed: {INSTALL}")
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"{module} cannot be imported ({error}): {INSTALL}") from error
