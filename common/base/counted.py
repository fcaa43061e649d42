"""Formats a count with its noun for messages. Pure."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return for example `1 node` or `2 nodes`. `noun` is the singular; an irregular plural follows a slash: `entry/entries`."""
    one, _, more = noun.partition("/")
    return f"{count} {one if count == 1 else more or one + 's'}"
