"""The page of the fault matrix keeps its other parts."""

from __future__ import annotations

from support.fault_report import render, replaced

PAGE = "# The fault matrix\n\nold\n\n# The fuzzer\n\nkept\n"


def test_a_part_takes_the_place_of_the_one_with_its_title() -> None:
    page = replaced(PAGE, "# The fault matrix\n\nnew\n")
    assert page == "# The fault matrix\n\nnew\n\n# The fuzzer\n\nkept\n"
    assert replaced(page, "# The fault matrix\n\nnew\n") == page


def test_a_part_that_is_not_there_yet_comes_last() -> None:
    assert replaced(PAGE, "# The fault matrix with certificates\n\nnew\n").endswith(
        "kept\n\n# The fault matrix with certificates\n\nnew\n"
    )


def test_without_results_every_cell_is_listed_as_not_run() -> None:
    for tls in (False, True):
        assert "0 ok, 0 failed, 144 not run, of 144" in render({}, tls=tls)
