"""The comparison's section of the documents and its JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from bench.peers.comparison import Options, Samples
from bench.peers.goodput import Point
from bench.peers.report import Limits
from bench.peers.section import BEGIN, END, as_json, replace_section, write_section
from bench.peers.systems import every_system
from support.paths import ROOT

from common.base.errors import ConfigError

ABOUT = {"cpu": "Some Processor", "cores": 2, "torch": "2.13.0"}
SYSTEMS = every_system(Path())


def samples() -> Samples:
    found = Samples()
    found.limits["33m"] = [Limits(31e9, 420e9)]
    found.figures["33m"] = {"kvrelay": [{"one_stream": 56.0, "long_ttft": math.inf}], "vllm": [{"one_stream": 136.0}]}
    found.goodput["two hosts"] = {"kvrelay": [Point("kvrelay", 1.0, 0.5, 0.5, math.nan, 1.0)]}
    found.left_out["llama.cpp"] = "it is built from source, and there is no C++ compiler here; " * 4
    return found


def test_the_section_names_processor_options_figures_and_what_was_left_out() -> None:
    options = Options(cache=Path(), peers=["vllm"], shapes=["33m"], only=[])
    text = write_section(samples(), options, ABOUT, SYSTEMS)
    for expected in (
        "Some Processor, 2 cores",
        "memory read 31 to 31 GB/s",
        "--max-num-batched-tokens 256",
        "| one stream, tokens/s | 56 |",
        "136.0 (0.41 x)",
        "### Is disaggregation worth it here?",
        "On two hosts with one core each",
        "- llama.cpp: it is built from source",
    ):
        assert expected in " ".join(text.split())
    assert all(len(line) <= 125 for line in text.splitlines() if not line.startswith("|"))


def test_only_the_text_between_the_markers_is_replaced() -> None:
    page = f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once = replace_section(page, "new")
    assert once == f"before\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    assert replace_section(once, "new") == once


@pytest.mark.parametrize("page", ["", BEGIN, f"{END} {BEGIN}"])
def test_a_page_without_markers_is_refused(page: str) -> None:
    with pytest.raises(ConfigError, match="no markers"):
        replace_section(page, "new")


def test_the_benchmarks_page_has_the_markers() -> None:
    replace_section((ROOT / "docs" / "benchmarks.md").read_text("utf-8"), "new")


def test_what_is_not_a_number_is_null_in_the_json() -> None:
    whole = json.loads(json.dumps(as_json(samples(), ABOUT, SYSTEMS)), parse_constant=pytest.fail)
    assert whole["figures"]["33m"]["kvrelay"] == [{"one_stream": 56.0, "long_ttft": None}]
    assert whole["goodput"]["two hosts"]["kvrelay"][0]["itl_p99"] is None
    assert whole["limits"]["33m"] == [{"read": 31e9, "product": 420e9}]
