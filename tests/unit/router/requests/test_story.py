"""Stories of requests: bounded in number and in bytes, plain data when read."""

from __future__ import annotations

import json
import time

from router.requests.request import TraceContext
from router.requests.story import Stories, Story


def begun(stories: Stories, request_id: str, client_id: str = "") -> Story:
    story = Story(request_id, client_id)
    stories.enter(story)
    return story


def finish(stories: Stories, request_id: str, client_id: str = "", reason: str = "stop") -> None:
    story = begun(stories, request_id, client_id)
    story.add("arrived", data={"prompt_tokens": 3})
    story.add("finished", reason, {"completion_tokens": 2})
    stories.end(story)


def test_only_so_many_finished_ones_are_kept_and_running_ones_always() -> None:
    stories = Stories(max_finished=3)
    running = begun(stories, "running")
    for index in range(10):
        finish(stories, f"r{index}")
    assert [story["request_id"] for story in stories.recent(100)] == ["running", "r9", "r8", "r7"]
    assert stories.get("r6") is None
    assert stories.get("nothing") is None
    assert stories.get("") is None
    running.add("cancelled", "the client disconnected")
    stories.end(running)
    assert [story["outcome"] for story in stories.recent(2)] == ["cancelled", "finished"]


def test_memory_is_bounded_whatever_a_request_does() -> None:
    stories = Stories(max_bytes=1_000_000)
    for index in range(200):
        story = begun(stories, f"r{index}")
        for attempt in range(1000):
            story.add("leg_failed", "x" * 10_000, {"attempt": attempt})
        story.add("failed", "over")
        assert len(story.events) <= 200
        stories.end(story)
    kept = stories.recent(1000)
    assert 1 <= len(kept) < 20
    whole = stories.get("r199")
    assert whole is not None
    assert (whole["events"][0]["data"], whole["events"][-1]["event"]) == ({"attempt": 0}, "failed")
    assert whole["events_omitted"] == 801
    assert max(len(event["reason"]) for event in whole["events"]) == 500


def test_trace_headers_count_as_memory_of_the_story() -> None:
    story = Story("r")
    size = story.size_bytes
    story.trace = TraceContext("p" * 55, "s" * 512)
    assert story.size_bytes == size + 567


def test_several_prompts_of_one_request_are_found_together_and_a_clients_id_finds_the_latest() -> None:
    stories = Stories()
    for index in range(3):
        finish(stories, f"cmpl-1-{index}", "mine")
    finish(stories, "cmpl-2", "mine", "length")
    together = stories.get("cmpl-1")
    assert together is not None
    assert [choice["request_id"] for choice in together["choices"]] == ["cmpl-1-0", "cmpl-1-1", "cmpl-1-2"]
    latest = stories.get("mine")
    assert latest is not None
    assert latest["request_id"] == "cmpl-2"
    assert json.loads(json.dumps(latest)) == latest


def test_a_clients_id_finds_all_prompts_of_the_latest_request_with_it() -> None:
    stories = Stories()
    for number in ("1", "2"):
        for index in range(3):
            finish(stories, f"cmpl-{number}-{index}", "mine")
    found = stories.get("mine")
    assert found is not None
    assert found["request_id"] == "cmpl-2"
    assert [choice["request_id"] for choice in found["choices"]] == ["cmpl-2-0", "cmpl-2-1", "cmpl-2-2"]


def test_writing_a_story_costs_microseconds() -> None:
    stories = Stories()
    rounds: list[float] = []
    for _ in range(5):  # the fastest counts: a garbage collection of everything that the tests hold is not its cost
        started = time.process_time()
        for index in range(400):
            story = begun(stories, f"r{index}")
            for event in ("arrived", "decision", "sent", "sent", "first_token", "handover", "finished"):
                story.add(event, "a reason", {"node": "d0"})
            stories.end(story)
        rounds.append((time.process_time() - started) / 400)
    each_s = min(rounds)
    print(f"{each_s * 1e6:.1f} us a request")
    assert each_s < 200e-6
