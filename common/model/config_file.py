"""Typed access to a model directory's JSON files, with errors that name file and key. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from common.base.errors import ConfigError

MOST_LAYERS = 10_000
_OF_WHOLE = {
    *("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"),
    *("quantization_config", "compression_config"),
}
"""Keys of a whole model whose text part is nested."""


def read_generation_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """`generation_config.json` of a model folder and what it holds: nothing where it is missing or empty.

    Raises: ConfigError as `read_json_object`.
    """
    file = folder / "generation_config.json"
    return file, read_json_object(file) if file.exists() and file.stat().st_size else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in file `path`.

    Raises: ConfigError if it is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", value)


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The classes of transformers that the content of a config.json names."""
    return [str(name) for name in as_list(config.get("architectures"))]


def first_architecture(folder: Path) -> str:
    """The first class that the config.json in this folder names; empty if there is none. Raises: ConfigError."""
    file = folder / "config.json"
    return next(iter(architectures(read_json_object(file))), "") if file.is_file() else ""


def as_list(value: object) -> list[Any]:
    """`value` if it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def as_object(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


class ConfigFile:
    """A `config.json`. A key that is null counts as missing. Raises: ConfigError for an invalid value."""

    def __init__(self, path: Path, raw: dict[str, Any] | None = None) -> None:
        """`raw`: the object where the file at `path` holds it in another form."""
        self._path = path
        self.raw = read_json_object(path) if raw is None else raw

    def num_layers(self) -> int:
        """A positive number, small enough that one object for each layer costs nothing."""
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """A positive integer, of at most `most`."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive integer, not {value!r}")
        if value > most:
            raise self.error(f"{key} must be at most {most}, not {value}")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer of at least 0."""
        value = self.raw.get(key)
        if value is None:
            return default
        return 0 if type(value) is int and value == 0 else self.integer(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, within: dict[str, Any] | None = None) -> float:
        """A positive, finite number; `within` is an object of this file that holds the key instead."""
        value = (self.raw if within is None else within).get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def object(self, key: str, within: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object under the key, empty if it is missing; `within` as of `number`."""
        value = (self.raw if within is None else within).get(key)
        if not isinstance(value, dict | None):
            raise self.error(f"{key} is not an object")
        return cast("dict[str, Any]", value or {})

    def renamed(self, keys: dict[str, str]) -> ConfigFile:
        """The same file, whose keys `keys[name]` are also read as `name`."""
        return ConfigFile(self._path, {**self.raw, **{name: self.raw.get(own) for name, own in keys.items()}})

    def with_defaults(self, values: dict[str, Any]) -> ConfigFile:
        """The same file, whose missing keys have these values."""
        own = {key: value for key, value in self.raw.items() if value is not None or key not in values}
        return ConfigFile(self._path, {**values, **own})

    def with_nested(self, key: str) -> ConfigFile:
        """The object that `key` holds, if it holds one, with what this file says of the whole model. As in transformers, no other key of this file applies to that object."""
        nested = self.raw.get(key)
        if not isinstance(nested, dict):
            return self
        own = {name: self.raw[name] for name in _OF_WHOLE & self.raw.keys()}
        return ConfigFile(self._path, own).with_defaults(cast("dict[str, Any]", nested))

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path}: {message}")
