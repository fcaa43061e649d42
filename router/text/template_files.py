"""Reads a model's chat templates from its files. Router process, at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from common.base.errors import ConfigError

DEFAULT, TOOL_USE = "default", "tool_use"


def read_templates(folder: Path, config: Mapping[str, Any], override: str | None) -> dict[str, str]:
    """The sources of the chat templates by name; empty if there are none. The name `tool_use` is for requests with tools.

    `override`: the operator's file. `config`: the content of tokenizer_config.json, which counts if there is no
    chat_template.jinja.
    Raises: ConfigError when a file cannot be read.
    """
    if override is not None:
        return {DEFAULT: _read(Path(override))}
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {DEFAULT: _read(file)}
        special = folder / "additional_chat_templates" / f"{TOOL_USE}.jinja"
        return {**named, TOOL_USE: _read(special)} if special.is_file() else named
    found = config.get("chat_template")
    if isinstance(found, list):
        return _named(folder, cast("list[Any]", found))
    return {DEFAULT: found} if isinstance(found, str) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {file}: {error}") from error


def _named(folder: Path, entries: list[Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in entries:
        fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ConfigError(f"chat_template in {folder}/tokenizer_config.json must list names with their templates")
        named[name] = template
    if named:
        named.setdefault(DEFAULT, next(iter(named.values())))
    return named
