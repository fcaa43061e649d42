"""Values of vLLM's options in the form that ours have. Pure.

Each function here makes the `convert` of an option: its values, one or more words, become our words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, cast

Convert = Callable[[list[str]], list[str]]

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")


def renamed(*flags: str) -> Convert:
    """The same value under these names."""
    return lambda values: [word for flag in flags for word in (flag, values[0])]


def table_of(flag: str, **values: str) -> Convert:
    """`flag` with a value that is spelt in another way here; values that are not in the table stay."""
    return lambda given: [flag, values.get(given[0], given[0])]


def human_number(*flags: str, divisor: float = 0) -> Convert:
    """A number such as 8192, 8k (8000) or 8K (8192), divided by `divisor` if there is one."""

    def convert(values: list[str]) -> list[str]:
        number = _plain(values[0])
        if divisor and number.isdecimal():
            number = f"{int(number) / divisor:.9g}"
        return [word for flag in flags for word in (flag, number)]

    return convert


def optional_number(flag: str) -> Convert:
    """The same, where `auto` or -1 asks for the default."""
    return lambda values: [flag, "none" if values[0] in ("auto", "-1") else _plain(values[0])]


def lora_module(values: list[str]) -> list[str]:
    """`--lora` with adapters as NAME=FOLDER; JSON objects have `name` and `path`, and so have those in a list.

    Raises: ValueError with a sentence.
    """
    modules: list[str] = []
    for value in values:
        if not value.lstrip().startswith(("{", "[")):
            modules.append(value)
            continue
        try:
            found: Any = json.loads(value)
        except ValueError:
            raise ValueError(f"{value!r} is not valid JSON") from None
        for each in cast("list[Any]", found if isinstance(found, list) else [found]):
            if not isinstance(each, dict) or not {"name", "path"} <= cast("dict[str, Any]", each).keys():
                raise ValueError(f"{value!r} must be an object with name and path")
            modules.append(f"{each['name']}={each['path']}")
    return ["--lora", *modules]


def _plain(value: str) -> str:
    found = _HUMAN.fullmatch(value)
    return value if found is None else str(int(float(found[1]) * _UNITS[found[2]]))
