"""What the load generator sends: shared prefixes, lengths."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.load.jobs import LoadJob, synthetic_job
from kvrelay.load.plan import LoadPlan

PLAN = LoadPlan(
    "http://x", "m", prefixes=3, prefix_tokens=32, suffix_tokens=16, output_tokens=4, vocab_size=1000, concurrency=1
)


def job(number: int, **options: int) -> LoadJob:
    return synthetic_job(replace(PLAN, **options), number)


def test_prompts_share_exactly_the_given_number_of_prefixes_and_nothing_else() -> None:
    jobs = [job(number) for number in range(60)]
    assert len({tuple(each.prompt[:32]) for each in jobs}) == 3
    assert len({tuple(each.prompt[32:]) for each in jobs}) == 60
    assert all(100 <= token < 900 for each in jobs for token in each.prompt)
    assert {len(each.prompt) for each in jobs} == {48}


def test_a_job_depends_on_its_number_and_the_seed_only() -> None:
    assert job(7) == job(7)
    assert job(7) != job(7, seed=1)
    warm_up, measured = job(-1), job(1)
    assert warm_up.prompt[32:] != measured.prompt[32:]


def test_text_prompts_put_the_shared_part_into_the_system_message() -> None:
    jobs = [job(number, chat=True, prefixes=2, prefix_tokens=10, suffix_tokens=5) for number in range(20)]
    assert len({each.system for each in jobs}) == 2
    assert all(len(each.system.split()) == 10 and len(str(each.prompt).split()) == 5 for each in jobs)


def test_long_contexts_have_lengths_of_every_magnitude_up_to_the_longest() -> None:
    lengths = [len(job(number, longest_tokens=16_000).prompt) - 32 for number in range(400)]
    assert 16 <= min(lengths) < 32
    assert 8_000 < max(lengths) <= 16_000
    by_magnitude = [sum(low <= length < 10 * low for length in lengths) / 400 for low in (16, 160, 1600)]
    assert all(0.25 < share < 0.42 for share in by_magnitude)
