"""The dashboard of a real cluster with two nodes of each role: topology, draining, the waterfall of a request that survived."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser.conftest import NARROW, OpenPage
from support.system import System, running_system, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
PROMPT = list(range(300, 500))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("dashboard")
    args = ("--prefill", "2", "--decode", "2", "--kv-memory-gb", "0.05", "--local-prefill-tokens", "0")
    with running_system(folder, *args) as system:
        system.wait_usable(2, 2)
        yield system


def test_topology_shows_two_nodes_of_each_role_and_a_relay(
    system: System, open_page: OpenPage, screenshots: Path | None
) -> None:
    page = open_page(f"{system.url}/")
    page.wait_for_selector("ul[aria-label='Decode nodes'] li:nth-child(2)")
    assert page.locator("ul[aria-label='Prefill nodes'] li").count() == 2
    page.wait_for_function(
        "() => [...document.querySelectorAll('.node .state')].filter(e => e.textContent === 'usable').length === 4"
    )
    _complete(system, 8)
    page.wait_for_selector("svg.arrows g path", state="attached")
    page.wait_for_function("() => document.querySelector('.relays tbody').textContent.includes('prefill')")
    if screenshots is not None:
        page.screenshot(path=screenshots / "cluster.png", full_page=True)
        dark = open_page(f"{system.url}/ui/", NARROW, dark=True)
        dark.wait_for_selector(".relays tbody tr")
        dark.screenshot(path=screenshots / "cluster-dark-narrow.png", full_page=True)


def test_waterfall_shows_the_fault_and_both_attempts_of_a_relayed_request_that_survived_a_kill(
    system: System, open_page: OpenPage, screenshots: Path | None
) -> None:
    page = open_page(f"{system.url}/ui/requests.html")  # from now on, nodes report what they do
    page.wait_for_function("() => document.querySelector('.status').textContent === 'live'")
    httpx.get(f"{system.url}/ui/api/snapshot").raise_for_status()
    with httpx.stream("POST", f"{system.url}/v1/completions", json=_body(400, stream=True), timeout=120) as answer:
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
        name = answer.headers["x-kvrelay-decode-node"]
        pid = httpx.get(f"{system.url}/ui/api/nodes/{name}").json()["own"]["pid"]
        os.kill(pid, signal.SIGKILL)
        assert list(lines)[-2] == "data: [DONE]" or answer.is_stream_consumed
    request = answer.headers["x-kvrelay-request-id"]
    page.goto(f"{system.url}/ui/requests.html?id={request}")
    page.wait_for_selector("svg.waterfall .fault")
    names = page.locator("svg.waterfall .name").all_text_contents()
    for wanted in ("attempt 1", "attempt 2", "1: first token", "1: offer to grant", "2: resumed", "2: decode"):
        assert wanted in names, names
    assert any(name.startswith("1: prefill chunk") for name in names), names
    assert any(name.startswith("1: KV of layer") for name in names), names
    if screenshots is not None:
        page.screenshot(path=screenshots / "waterfall.png", full_page=True)
    system.wait_usable(2, 2)


def test_a_node_is_drained_and_undrained_from_the_page(system: System, open_page: OpenPage) -> None:
    page = open_page(f"{system.url}/ui/")
    page.locator("ul[aria-label='Decode nodes'] button").first.click()
    page.get_by_role("button", name="Drain", exact=True).click()
    wait_until(lambda: system.health().get("decode") == 1, 20, "one decode node drained")
    page.get_by_role("button", name="Undrain").click()
    wait_until(lambda: system.health().get("decode") == 2, 20, "the node is back")


def test_another_site_cannot_drain(system: System) -> None:
    url = f"{system.url}/ui/api/nodes/decode-0/drain"
    assert httpx.post(url).status_code == 403
    assert httpx.post(url, headers={"x-kvrelay-ui": "1", "origin": "http://elsewhere.example"}).status_code == 403
    assert httpx.post(url, headers={"x-kvrelay-ui": "1", "host": "rebound.example"}).status_code == 403


def _body(tokens: int, *, stream: bool = False) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream, "seed": 1}


def _complete(system: System, count: int) -> None:
    """`count` different prompts at once."""

    def one(number: int) -> None:
        body = {**_body(8), "prompt": [number + 300, *PROMPT]}
        httpx.post(f"{system.url}/v1/completions", json=body, timeout=120).raise_for_status()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_front_page_tells_an_operator_what_happened_and_what_is_wrong(
    system: System, open_page: OpenPage, screenshots: Path | None
) -> None:
    system.wait_usable(2, 2)
    page = open_page(f"{system.url}/")
    _complete(system, 8)
    figures = page.get_by_label("The last minute")
    page.wait_for_function("() => /[1-9]/.test(document.querySelector('.overview dd').textContent)")
    names = figures.locator("dt").all_text_contents()
    assert names == ["Requests", "Tokens", "First token", "Prefix hits", "Errors"]
    findings = page.get_by_label("Findings").locator("li")
    findings.first.wait_for()
    httpx.post(f"{system.url}/ui/api/nodes/decode-0/drain", headers={"x-kvrelay-ui": "1"}, json={}).raise_for_status()
    page.get_by_label("Changes").get_by_text("decode-0 is draining, was usable").wait_for()
    page.get_by_label("Findings").get_by_text("drains: it gets no new requests").wait_for()
    httpx.post(f"{system.url}/ui/api/nodes/decode-0/undrain", headers={"x-kvrelay-ui": "1"}, json={}).raise_for_status()
    if screenshots is not None:
        page.screenshot(path=screenshots / "overview.png", full_page=True)
        narrow = open_page(f"{system.url}/ui/", NARROW, dark=True)
        narrow.wait_for_selector(".overview .changes li")
        narrow.screenshot(path=screenshots / "overview-dark-narrow.png", full_page=True)


def test_requests_are_searched_and_say_why_their_nodes_were_chosen(
    system: System, open_page: OpenPage, screenshots: Path | None
) -> None:
    system.wait_usable(2, 2)
    answers = [httpx.post(f"{system.url}/v1/completions", json=_body(4), timeout=120) for _ in range(2)]
    ids = [answer.headers["x-kvrelay-request-id"] for answer in answers]
    page = open_page(f"{system.url}/ui/requests.html", NARROW)
    page.get_by_role("link", name=ids[1]).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits the window"
    box = page.get_by_role("link", name=ids[1]).bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= NARROW[0], "the whole id is seen"
    page.get_by_label("Search").fill(ids[0])
    assert page.locator("tbody tr").count() == 1
    page.get_by_label("Outcome").select_option("failed")
    page.get_by_text("No request matches.").wait_for()
    page.goto(f"{system.url}/ui/requests.html?id={ids[0]}")
    why = page.get_by_label("Why these nodes")
    why.get_by_text("by kv_aware, relayed: ").wait_for()
    assert "decode-" in (why.text_content() or "")
    if screenshots is not None:
        page.screenshot(path=screenshots / "why-narrow.png", full_page=True)


def test_charts_begin_with_what_the_router_kept(system: System, open_page: OpenPage, screenshots: Path | None) -> None:
    _complete(system, 4)
    wait_until(lambda: len(httpx.get(f"{system.url}/ui/api/history").json()["points"]) > 2, 60, "three points are kept")
    page = open_page(f"{system.url}/ui/charts.html")
    page.wait_for_function("() => document.querySelectorAll('.panel .num').length > 0")
    page.get_by_label("Tokens", exact=True).get_by_text("generated").wait_for()
    if screenshots is not None:
        page.screenshot(path=screenshots / "charts.png", full_page=True)
