"""What sentence-transformers keeps beside a model: how vectors are pooled, and the longest input. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast, get_args

from common.base.errors import ConfigError
from common.model.config_file import ConfigFile, as_object, read_json_object

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
    """The limit of an input's tokens as sentence-transformers has it: its own, which it keeps as the tokenizer's since
    version 6."""
    config = _transformer_config(path)
    if config.raw.get("max_seq_length") is not None:
        return config.integer("max_seq_length")
    file = path / "tokenizer_config.json"
    limit: object = read_json_object(file).get("model_max_length") if file.is_file() else None
    is_limit = isinstance(limit, int | float) and 1 <= limit < default  # 10^30 means unlimited
    return int(cast("float", limit)) if is_limit else default


def _transformer_config(path: Path) -> ConfigFile:
    """The settings that sentence-transformers has of the model itself; empty if there are none."""
    files = (path / f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "xlm-roberta"))
    return next((ConfigFile(file) for file in files if file.is_file()), ConfigFile(path, {}))


def noted_activation(path: Path) -> str | None:
    """The activation of a cross-encoder's output that sentence-transformers 6 has noted; None: it has noted none."""
    name = _own_config(path).get("activation_fn")
    return None if name is None else str(name)


def default_prompt(path: Path) -> str:
    """What sentence-transformers puts before every text unless it is asked for another prompt; empty: nothing."""
    config = _own_config(path)
    return str(as_object(config.get("prompts")).get(str(config.get("default_prompt_name"))) or "")


def _own_config(path: Path) -> dict[str, Any]:
    """The settings that sentence-transformers has of the whole; empty if there are none."""
    file = path / "config_sentence_transformers.json"
    return read_json_object(file) if is_sentence_transformer(path) and file.is_file() else {}


def read_pooling(path: Path, default: Pooling) -> Pooling:
    """How vectors are pooled. Raises: ConfigError for what is not supported."""
    folder = _pooling_folder(path / _MODULES)
    if _transformer_config(path).flag("do_lower_case", False):
        raise ConfigError(f"{path}: do_lower_case of sentence-transformers is not supported")
    file = path / folder / "config.json"
    if not file.is_file():
        return default
    raw = read_json_object(file)
    found: list[Pooling] = [mode for key, mode in _POOLING_KEYS.items() if raw.get(key)]
    named = raw.get("pooling_mode")
    if named in get_args(Pooling):
        return cast("Pooling", named)
    others = [
        key for key, value in raw.items() if key.startswith("pooling_mode_") and key not in _POOLING_KEYS and value
    ]
    if len(found) != 1 or others:  # vectors of several modes are joined
        raise ConfigError(f"{file}: exactly one of {', '.join(_POOLING_KEYS)} must be set")
    return found[0]


def _pooling_folder(file: Path) -> str:
    """Where the settings of pooling are. Raises: ConfigError for modules after the model other than pooling and
    normalization."""
    folder = "1_Pooling"
    if not file.is_file():
        return folder
    try:
        found: Any = json.loads(file.read_bytes())
        kinds = [str(module["type"]).rpartition(".")[2] for module in found][1:]
        folders = [str(module["path"]) for module, kind in zip(found[1:], kinds, strict=True) if kind == "Pooling"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} is not a list of sentence-transformers' modules") from error
    for kind in kinds:
        if kind not in ("Pooling", "Normalize"):
            raise ConfigError(f"{file}: the module {kind} is not supported; only Pooling and Normalize are")
    return folders[0] if folders else folder
