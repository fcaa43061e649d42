"""What sentence-transformers keeps beside a model: how vectors are pooled, and the longest input. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast, get_args

from common.base.errors import ConfigError
from common.model.config_file import ConfigFile, read_json_object

Pooling = Literal["cls", "mean", "max", "lasttoken"]
_POOLING_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = "modules.json"


def is_sentence_transformer(path: Path) -> bool:
    """Whether sentence-transformers has saved the model in this folder."""
    return (path / _MODULES).is_file()


def max_seq_length(path: Path, default: int) -> int:
    """sentence-transformers' own limit of an input's tokens."""
    file = path / "sentence_bert_config.json"
    return ConfigFile(file).integer("max_seq_length", default) if file.is_file() else default


def read_pooling(path: Path, default: Pooling) -> Pooling:
    """How vectors are pooled. Raises: ConfigError for what is not supported."""
    _check_modules(path / _MODULES)
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return default
    raw = read_json_object(file)
    found: list[Pooling] = [mode for key, mode in _POOLING_KEYS.items() if raw.get(key)]
    named = raw.get("pooling_mode")
    if named in get_args(Pooling):
        return cast("Pooling", named)
    if len(found) != 1:
        raise ConfigError(f"{file}: exactly one of {', '.join(_POOLING_KEYS)} must be set")
    return found[0]


def _check_modules(file: Path) -> None:
    """Raises: ConfigError for modules after the model other than pooling and normalization."""
    if not file.is_file():
        return
    try:
        found: Any = json.loads(file.read_bytes())
        kinds = [str(module["type"]).rpartition(".")[2] for module in found][1:]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} is not a list of sentence-transformers' modules") from error
    for kind in kinds:
        if kind not in ("Pooling", "Normalize"):
            raise ConfigError(f"{file}: the module {kind} is not supported; only Pooling and Normalize are")
