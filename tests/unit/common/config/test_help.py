"""The help of services: groups, whole names, any width."""

from __future__ import annotations

import re

import pytest

from common.config.cli import (
    HelpRow,
    _help_rows,  # pyright: ignore[reportPrivateUsage]
    help_text,
)
from common.config.fields import field_infos
from common.config.service_configs import SERVICES, ServiceConfig


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("service", SERVICES)
def test_every_option_has_its_whole_name_and_variable_in_its_group(service: type[ServiceConfig], width: int) -> None:
    text = help_text("Usage: x", "What it does.", _help_rows(service, ""), width)
    groups = re.split(r"^(\w[\w ]*)\n-+\n", text, flags=re.M)
    in_group = dict(zip(groups[1::2], groups[2::2], strict=True))
    for name, info in field_infos(service).items():
        assert re.search(rf"^  --{name.replace('_', '-')} ", in_group[info.group], re.M)
        assert f"KVRELAY_{name.upper()}" in in_group[info.group]
    long = max(len(line) for line in text.splitlines() if not line.startswith("  --"))
    assert long <= max(width, 60)


def test_groups_are_in_the_order_of_their_first_options_and_texts_wrap() -> None:
    rows = [HelpRow("B", "--b", "word " * 30, "KVRELAY_B", "1"), HelpRow("A", "--a", "x"), HelpRow("B", "--c", "y")]
    text = help_text("Usage: x", "[bold]Examples:[/bold] one\ntwo\n\nthree", rows, 40)
    assert text.startswith("Usage: x\n\nExamples: one two\n\nthree\n\nB\n-\n  --b\n      word word")
    assert "default: 1]\n  --c\n      y\n\nA\n-\n  --a\n      x\n" in text
    assert max(map(len, text.splitlines())) <= 40
