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
    assert httpx.post(url, headers={"x-kvrelay-ui": "1", "host": "rebound.example"}).status_code == 401


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
