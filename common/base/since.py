"""The mark of a field that was added to a message later: `common.control.versions` reads it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Since:
    """The version in which a field was added, in the field's annotation. An older end is not sent the field.

    needed: an older end would do something wrong without the field, so a message in which it differs from its default is
    refused instead.
    """

    version: int
    needed: bool = False
