"""Numbers of things in messages. Pure."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`; `noun` is the singular, with another plural after a slash: `entry/entries`."""
    one, _, more = noun.partition("/")
    return f"{count} {one if count == 1 else more or one + 's'}"
