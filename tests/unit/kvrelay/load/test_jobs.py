"""What the load generator sends: shared prefixes, lengths."""

from __future__ import annotations

from kvrelay.load.jobs import SyntheticPrompts


def synthetic(**options: int) -> SyntheticPrompts:
    return SyntheticPrompts(**{"prefixes": 3, "prefix_tokens": 32, "suffix_tokens": 16, "output_tokens": 4, "vocab_size": 1000, **options})  # fmt: skip


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
    text = SyntheticPrompts(2, 10, 5, 4, 1000, text=True)
    jobs = [text.job(number) for number in range(20)]
    assert len({job.system for job in jobs}) == 2
    assert all(len(job.system.split()) == 10 and len(str(job.prompt).split()) == 5 for job in jobs)


def test_long_contexts_have_lengths_of_every_magnitude_up_to_the_longest() -> None:
    lengths = [len(synthetic(longest_tokens=16_000).job(number).prompt) - 32 for number in range(400)]
    assert 16 <= min(lengths) < 32
    assert 8_000 < max(lengths) <= 16_000
    by_magnitude = [sum(low <= length < 10 * low for length in lengths) / 400 for low in (16, 160, 1600)]
    assert all(0.25 < share < 0.42 for share in by_magnitude)
