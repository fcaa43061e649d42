"""The help of a service's command: its options in groups, each with its whole name, at any width of the terminal. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class HelpRow(NamedTuple):
    """One option."""

    group: str
    names: str
    """The option's flags and the type of its value, such as `--port INTEGER`."""
    help: str
    variable: str = ""
    default: str = ""


def help_text(usage: str, description: str, rows: Iterable[HelpRow], width: int) -> str:
    """The whole help: usage, description, then each group under its name, in the order of their first options."""
    plain = re.sub(r"\[/?bold\]", "", description).strip()
    paragraphs = [textwrap.fill(" ".join(part.split()), width) for part in plain.split("\n\n")]
    groups: dict[str, list[HelpRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    blocks = [_group(name, members, width) for name, members in groups.items()]
    return "\n\n".join([usage.strip(), *paragraphs, *blocks]) + "\n"


def _group(name: str, rows: Sequence[HelpRow], width: int) -> str:
    lines = [name, "-" * len(name)]
    for row in rows:
        more = [row.variable, f"default: {row.default}" if row.default else ""]
        told = "; ".join(each for each in more if each)
        text = f"{row.help} [{told}]" if told else row.help
        wrap = textwrap.TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False)
        wrap.break_on_hyphens = False
        lines += [f"  {row.names}", *wrap.wrap(text)]
    return "\n".join(lines)
