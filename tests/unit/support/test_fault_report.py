"""The page of the fault matrix keeps its other parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fault_report import main, replaced

PAGE = "# The fault matrix\n\nold\n\n# The fuzzer\n\nkept\n"


def test_a_part_takes_the_place_of_the_one_with_its_title() -> None:
    page = replaced(PAGE, "# The fault matrix\n\nnew\n")
    assert page == "# The fault matrix\n\nnew\n\n# The fuzzer\n\nkept\n"
    assert replaced(page, "# The fault matrix\n\nnew\n") == page


def test_a_part_that_is_not_there_yet_comes_last() -> None:
    assert replaced(PAGE, "# The fault matrix with certificates\n\nnew\n").endswith(
        "kept\n\n# The fault matrix with certificates\n\nnew\n"
    )


def test_a_page_of_a_whole_matrix_is_not_replaced_by_a_part_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "faults.md"
    page.write_text(PAGE)
    main(tmp_path / "no-results.jsonl", page)
    assert page.read_text() == PAGE
    assert "0 ok, 0 failed, 144 not run, of 144" in capsys.readouterr().out
