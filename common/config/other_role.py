"""The configuration of a node in its other role: what it was given, read as the options of the other command.

Pure except for reading the TOML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from common.base.errors import ConfigError
from common.config.fields import field_infos
from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig, options_in_other_role
from common.config.sources import UNSET, Resolved, resolve, suggestion

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


def in_other_role(resolved: Resolved[Any], cls: type[ConfigT], environ: Mapping[str, str]) -> ConfigT:
    """The configuration that the node has as a `cls`: its flags as far as `cls` has them, changed by `--in-other-role`, the
    environment, and the file's table for `cls`.

    Raises: ConfigError for an option that neither role has, and for what is wrong in the other role.
    """
    config = resolved.config
    known = field_infos(cls)
    flags = {
        name: _text(getattr(config, name))
        for name, source in resolved.sources.items()
        if source == "flag" and name in known and name != "in_other_role"
    }
    for name, value in options_in_other_role(config.in_other_role).items():
        if name not in known:
            of_any = {**field_infos(PrefillConfig), **field_infos(DecodeConfig)}
            raise ConfigError(f"--in-other-role: unknown option {name!r}{suggestion(name, of_any)}")
        flags.pop(name, None)
        if value is not None:
            flags[name] = _text(value)
    return resolve(cls, flags=flags, environ=environ, file=None).config


def _text(value: Any) -> str:
    return UNSET if value is None else str(value)
