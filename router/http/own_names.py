"""Rewrites errors of calls whose body becomes a chat request, with the field names that the client sent. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from starlette.types import Scope

from common.base.errors import ClientError, KvRelayError
from router.http.body_model import BodyModel

_NAMES = "kvrelay.own_names"
"""Key of a request's ASGI scope: the `OWN_NAMES` of its body."""
_PATH = re.compile(r"\w+(?:\.\w+)*(?=[: ])")


def note_names(scope: Scope, kind: type[BodyModel]) -> None:
    """Keep the names of a body of this kind for `by_own_name`."""
    scope[_NAMES] = kind.OWN_NAMES


def by_own_name(error: KvRelayError, scope: Scope) -> KvRelayError:
    """The error, with the path of the field that the client sent."""
    names: Mapping[str, str] = scope.get(_NAMES, {})
    if not isinstance(error, ClientError) or error.param is None:
        return error
    told, named = copy.copy(error), _PATH.match(error.message)
    if named is not None and named[0].partition(".")[0] == error.param:  # the message begins with the path
        path = _own_path(named[0], names)
        told.args = (path + error.message[named.end() :],)
    else:
        path = names.get(error.param, error.param)
    told.param = path.partition(".")[0]
    return told


def _own_path(path: str, names: Mapping[str, str]) -> str:
    """`path` with its longest prefix in `names` replaced. What follows is left out if it is an index: of another list."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        places = [part for part in parts[:count] if part.isdecimal()]
        own = names.get(".".join("*" if part.isdecimal() else part for part in parts[:count]))
        if own is not None:
            for place in places:
                own = own.replace("*", place, 1)
            rest = parts[count:]
            return own if rest and rest[0].isdecimal() else ".".join([own, *rest])
    return path
