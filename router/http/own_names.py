"""Errors of a call whose body becomes a chat request, by the names that its own fields have. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.types import Scope

from common.base.errors import ClientError, KvRelayError

_NAMES = "kvrelay.own_names"
"""Key, in a request's ASGI scope, of what its call calls the chat request's fields."""


def note_names(scope: Scope, kind: type[BaseModel]) -> None:
    """Bodies of this kind have names of their own, if it has `OWN_NAMES`: by name of a field of the chat call, the place of what
    means the same.
    """
    scope[_NAMES] = getattr(kind, "OWN_NAMES", {})


def by_own_name(error: KvRelayError, scope: Scope) -> KvRelayError:
    """The error, about the field that the client sent."""
    names: Mapping[str, str] = scope.get(_NAMES, {})
    if not isinstance(error, ClientError) or error.param is None or error.param not in names:
        return error
    told, place = copy.copy(error), names[error.param]
    rest = error.message.removeprefix(error.param)
    if rest.startswith((":", " ")):  # the message begins with the name
        told.args = (place + rest,)
    told.param = place.partition(".")[0]
    return told
