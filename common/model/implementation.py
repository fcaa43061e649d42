"""Looks up what a description asks for by name. No torch."""

from __future__ import annotations

from typing import TypeVar

from common.base.errors import ConfigError

_T = TypeVar("_T")


def implementation(what: str, kind: str, known: dict[str, _T]) -> _T:
    """The entry of `known` that a description asks for by name. Raises: ConfigError if there is none."""
    if kind not in known:
        raise ConfigError(
            f"the model needs the {what} {kind!r}, which is not implemented; implemented: {', '.join(known)}"
        )
    return known[kind]
