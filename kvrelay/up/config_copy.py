"""The configuration file of the children of `kvrelay up`: a copy, so that a restart reads what the start read."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from common.base.errors import ConfigError
from common.config.sources import CONFIG_FILE_VARIABLE
from kvrelay.up.plan import ChildSpec


def with_config_copy(specs: list[ChildSpec], directory: str) -> list[ChildSpec]:
    """Give the children a copy of the configuration file as it is now, for every restart.

    Raises: ConfigError if the file cannot be copied.
    """
    file = os.environ.get(CONFIG_FILE_VARIABLE)
    if not file:
        return specs
    try:
        kept = shutil.copyfile(file, os.path.join(directory, "kvrelay.toml"))
    except (OSError, shutil.SpecialFileError) as error:
        raise ConfigError(f"{file} cannot be copied for the services, it must be a regular file: {error}") from error
    return [replace(spec, environ={**spec.environ, CONFIG_FILE_VARIABLE: kept}) for spec in specs]
