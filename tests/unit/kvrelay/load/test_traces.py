"""Traces of Mooncake and Azure: reading, scaling, malformed lines. The samples here are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from kvrelay.load.plan import LoadPlan
from kvrelay.load.traces import read_trace, replayed_job


def trace(folder: Path, *rows: tuple[int, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return str(path)


def test_trace_keeps_its_structure_at_another_scale(tmp_path: Path) -> None:
    path = trace(tmp_path, (1000, 1300, 320, [1, 2, 3]), (3000, 1024, 31, [1, 2]), (2000, 600, 64, [1, 9]))
    plan, entries = LoadPlan("http://x", "m", scale=32, rate_scale=2.0, vocab_size=1000), read_trace(path)
    first, second, third = (replayed_job(plan, entries, number) for number in range(3))
    assert [job.at_s for job in (first, second, third)] == [0.0, 0.5, 1.0]
    assert [len(job.prompt) for job in (first, second, third)] == [40, 18, 32]
    assert [job.output_tokens for job in (first, second, third)] == [10, 2, 1]
    assert first.prompt[:32] == third.prompt
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:18] != second.prompt[16:18]


def test_malformed_trace_is_refused_with_its_line_number(tmp_path: Path) -> None:
    for text, words in (
        ("", "empty"),
        ("{}\n", "line 1"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "do not hold 513"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 1, "hash_ids": [1]}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": [1]}\n', "line 1: .* negative"),
        ("[1]\n", "line 1"),
        ("nonsense\n", "line 1"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_trace(str(tmp_path / "bad.jsonl"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(str(tmp_path / "nowhere"))


def azure(folder: Path, *rows: str, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> str:
    path = folder / "azure.csv"
    path.write_text("\r\n".join((header, *rows)) + "\r\n")
    return str(path)


def test_azures_trace_has_prompts_that_share_nothing(tmp_path: Path) -> None:
    path = azure(
        tmp_path,
        "2023-11-16 18:00:02.5000000,640,64",
        "2023-11-16 18:00:01.0000000,1280,32",
        "2023-11-16 18:00:03.1234567,9,0",
    )
    plan, entries = LoadPlan("http://x", "m", scale=32, rate_scale=0.5, vocab_size=1000), read_trace(path)
    jobs = [replayed_job(plan, entries, number) for number in range(len(entries))]
    assert [(len(job.prompt), job.output_tokens, job.at_s) for job in jobs] == [(40, 1, 0.0), (20, 2, 3.0)]
    assert jobs[0].prompt[:20] != jobs[1].prompt
    assert jobs == [replayed_job(plan, entries, number) for number in range(2)]


def test_azures_later_trace_names_a_time_zone(tmp_path: Path) -> None:
    path = azure(tmp_path, "2024-05-10 00:00:00.009930+00:00,1000,10", "2024-05-10 00:00:01.009930+00:00,1000,10")
    first, second = read_trace(path)
    assert second.at_s - first.at_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("yesterday,1,1", "line 2: Invalid isoformat"),
        ("2023-11-16 18:00:01,many,1", "line 2: invalid literal"),
        ("2023-11-16 18:00:01,0,1", "0 prompt tokens"),
        ("2023-11-16 18:00:01,9,-1", "-1 generated tokens"),
        ("2023-11-16 18:00:01,9", "line 2"),
    ],
)
def test_malformed_line_of_azures_trace_is_refused_with_its_number(tmp_path: Path, row: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(azure(tmp_path, row))


def test_an_azure_trace_without_its_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ContextTokens"):
        read_trace(azure(tmp_path, "2023-11-16 18:00:01,5", header="TIMESTAMP,Tokens"))
