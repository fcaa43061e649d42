"""The chat playground of a real cluster: which node made each token, how likely it was, and a node killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser.conftest import NARROW, OpenPage
from support.system import System, running_system

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
QUESTION = "Write a long story about a cat."
LENGTH = 1500


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    args = ("--decode", "2", "--kv-memory-gb", "0.05", "--local-prefill-tokens", "0")
    with running_system(tmp_path_factory.mktemp("playground"), *args) as system:
        system.wait_usable(1, 2)
        yield system


def ask(page: Any, question: str = QUESTION, tokens: int = LENGTH) -> None:
    page.wait_for_selector("select option", state="attached")
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Ignore the end token").check()
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def wait_ended(page: Any) -> str:
    """The text of the last answer, once it has ended."""
    page.wait_for_function("() => !document.querySelector('button.primary').disabled", timeout=60_000)
    return page.locator(".tokens").last.text_content()


def test_a_stream_goes_on_with_the_same_tokens_when_its_node_is_killed_from_the_page(
    system: System, open_page: OpenPage, screenshots: Path | None
) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    undisturbed = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60).json()
    before = {process["name"]: process["pid"] for process in system.processes()}
    page = open_page(f"{system.url}/ui/playground.html")
    ask(page)
    page.get_by_role("button", name="Kill decode-").click()
    text = wait_ended(page)
    assert text == undisturbed["choices"][0]["message"]["content"]
    nodes = page.locator("ul.legend li").all_text_contents()
    assert [entry.split(":")[0] for entry in nodes[:1]] == ["prefill-0"]
    decoders = [entry.split(":")[0] for entry in nodes if entry.startswith("decode-")]
    assert len(set(decoders)) == 2, nodes
    assert page.locator(".token").count() == LENGTH
    assert page.locator(".token.first").count() == 1, "where the second attempt begins"
    assert {page.locator(f".token[data-node={name}]").count() > 0 for name in decoders} == {True}
    if screenshots is not None:
        page.locator(".token").nth(20).hover()
        page.screenshot(path=screenshots / "playground.png", full_page=True)
    page.get_by_role("link", name="waterfall").click()
    page.wait_for_selector("svg.waterfall .fault")
    system.wait_usable(1, 2)
    after = {process["name"]: process["pid"] for process in system.processes()}
    assert [name for name in before if after[name] != before[name]] == [decoders[0]]


def test_probabilities_are_shown_on_hover_and_by_keyboard(
    system: System, open_page: OpenPage, screenshots: Path | None
) -> None:
    page = open_page(f"{system.url}/ui/playground.html", NARROW, dark=True)
    ask(page, "Hello!", 8)
    wait_ended(page)
    assert page.locator(".token").count() == 8
    token, detail = page.locator(".token").nth(2), page.locator(".detail")
    token.hover()
    assert detail.text_content().startswith("Token 3: ")
    assert detail.text_content().count("%") == 6
    page.mouse.move(0, 0)
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    assert detail.text_content().startswith("Token 2: ")
    if screenshots is not None:
        page.screenshot(path=screenshots / "playground-dark-narrow.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits the window"


def test_an_answer_is_stopped_and_the_next_one_knows_the_conversation(system: System, open_page: OpenPage) -> None:
    page = open_page(f"{system.url}/ui/playground.html")
    ask(page)
    page.wait_for_function("() => document.querySelectorAll('.token').length > 5")
    page.get_by_role("button", name="Stop").click()
    stopped = wait_ended(page)
    assert page.get_by_text("stopped").count() == 1
    with page.expect_request("**/ui/api/chat") as sent:
        ask(page, "Go on.", 4)
    roles = [(message["role"], message["content"]) for message in sent.value.post_data_json["messages"]]
    assert roles == [("user", QUESTION), ("assistant", stopped), ("user", "Go on.")]
    wait_ended(page)
    system.wait_whole()


def test_models_that_come_after_the_page_can_be_chosen(system: System, open_page: OpenPage) -> None:
    """A page that was opened before the first node had registered never had any."""
    script = """
let asked = 0;
const ask = window.fetch;
const none = () => Promise.resolve(new Response(JSON.stringify({ models: [], may_kill: false })));
window.fetch = (...all) => (String(all[0]).endsWith("/playground") && !asked++ ? none() : ask(...all));
"""
    page = open_page(f"{system.url}/ui/playground.html", script=script)
    page.wait_for_selector("select option", state="attached")
    assert page.get_by_role("status").first.text_content() == "live"


def test_a_page_notices_that_the_cluster_is_gone(system: System, open_page: OpenPage) -> None:
    page = open_page(f"{system.url}/ui/playground.html")
    page.wait_for_selector("select option", state="attached")
    page.wait_for_function("() => document.querySelector('.status').textContent === 'live'")
    page.route("**/ui/api/**", lambda route: route.abort())
    page.get_by_text("the router does not answer").wait_for()
    page.unroute("**/ui/api/**")
    page.wait_for_function("() => document.querySelector('.status').textContent === 'live'")


def test_the_waterfall_of_a_killed_stream_has_its_timeline_without_other_pages(
    system: System, open_page: OpenPage
) -> None:
    """Nodes reported their times only while Cluster or Charts was open."""
    system.wait_usable(1, 2)
    page = open_page(f"{system.url}/ui/playground.html")
    ask(page)
    page.get_by_role("button", name="Kill decode-").click()
    wait_ended(page)
    page.get_by_role("link", name="waterfall").click()
    page.wait_for_selector("svg.waterfall .fault")
    names = page.locator("svg.waterfall .name").all_text_contents()
    assert any(name.startswith("1: prefill chunk") for name in names), names
    system.wait_usable(1, 2)
