"""What the load generator sends and when: shared prefixes, arrivals, traces."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.tools.load.jobs import Replay, Synthetic, arrivals, read_trace


def synthetic(**options: int) -> Synthetic:
    return Synthetic(**{"prefixes": 3, "prefix_tokens": 32, "suffix_tokens": 16, "output_tokens": 4, "vocab_size": 1000, **options})  # fmt: skip


def test_prompts_share_exactly_the_given_number_of_prefixes_and_nothing_else() -> None:
    jobs = [synthetic().job(number) for number in range(60)]
    assert len({tuple(job.prompt[:32]) for job in jobs}) == 3
    assert len({tuple(job.prompt[32:]) for job in jobs}) == 60
    assert all(100 <= token < 900 for job in jobs for token in job.prompt)
    assert {len(job.prompt) for job in jobs} == {48}


def test_a_job_depends_on_its_number_and_the_seed_only() -> None:
    assert synthetic().job(7) == synthetic().job(7)
    assert synthetic().job(7) != synthetic(seed=1).job(7)
    warm_up, measured = synthetic().job(-1), synthetic().job(1)
    assert warm_up.prompt[32:] != measured.prompt[32:]


def test_text_prompts_put_the_shared_part_into_the_system_message() -> None:
    text = Synthetic(2, 10, 5, 4, 1000, text=True)
    jobs = [text.job(number) for number in range(20)]
    assert len({job.system for job in jobs}) == 2
    assert all(len(job.system.split()) == 10 and len(str(job.prompt).split()) == 5 for job in jobs)


def test_arrivals_have_the_given_rate_and_burstiness() -> None:
    for burstiness in (0.25, 1.0, 16.0):
        times = list(itertools.islice(arrivals(50.0, burstiness, seed=3), 4000))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
        variation = statistics.stdev(gaps) / statistics.mean(gaps)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.15)


def trace(folder: Path, *rows: tuple[int, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return str(path)


def test_trace_keeps_its_structure_at_another_scale(tmp_path: Path) -> None:
    path = trace(tmp_path, (1000, 1300, 320, [1, 2, 3]), (3000, 1024, 31, [1, 2]), (2000, 600, 64, [1, 9]))
    replay = Replay(read_trace(path), scale=32, rate_scale=2.0, vocab_size=1000)
    first, second, third = (replay.job(number) for number in range(3))
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
        ("[1]\n", "line 1"),
        ("nonsense\n", "line 1"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_trace(str(tmp_path / "bad.jsonl"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(str(tmp_path / "nowhere"))
