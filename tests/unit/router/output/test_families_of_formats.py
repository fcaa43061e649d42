"""The table of families in docs/tools.md: no family without a format, no cell without a word, no name that is not known."""

from __future__ import annotations

import re
from pathlib import Path

from common.model.families.registry import FAMILIES
from router.output.formats import TOOL_FORMATS
from router.structured.tool_markup import MARKUP

DOCS = Path(__file__).parents[4] / "docs"


def _rows(text: str, heading: str) -> list[list[str]]:
    table = text.partition(heading)[2].partition("\n|---")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[1:]]


def test_every_family_that_is_served_has_its_format() -> None:
    tools, models = (DOCS / "tools.md").read_text("utf-8"), (DOCS / "models.md").read_text("utf-8")
    rows = _rows(tools, "## Families")
    assert all(len(row) == 4 and all(row) for row in rows)
    classes = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert FAMILIES.keys() <= classes
    listed = (
        models.partition("Tested token for token against `generate`")[2].partition(": ")[2].partition(". Others")[0]
    )
    plain = re.sub(r"\([^)]*\)|, both with sinks\s+and windows", "", listed.partition("random weights: ")[2] or listed)
    families = {name.strip() for name in plain.split(",")}
    assert len(families) > 40
    assert families <= {name.strip() for row in rows for name in row[0].split(",")}
    for row in rows:
        named = re.findall(r"`(\w+)`", row[3])
        assert set(named) <= TOOL_FORMATS.keys()
        assert named or row[3] == "by the template"


def test_every_format_is_described_and_has_its_markup() -> None:
    rows = _rows((DOCS / "tools.md").read_text("utf-8"), "## Formats")
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == TOOL_FORMATS.keys()
    assert MARKUP.keys() - {"mistral_args"} == TOOL_FORMATS.keys()
