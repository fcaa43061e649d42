"""What every page of the dashboard has: navigation, headers, both schemes, narrow screens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.conftest import NARROW, OpenPage
from support.dashboards import served_dashboard

pytestmark = pytest.mark.browser
PAGES = ("Cluster", "Requests", "Charts", "Prefixes", "Playground")


@pytest.fixture
def url() -> Iterator[str]:
    with served_dashboard() as url:
        yield url


def test_a_browser_is_led_to_the_dashboard_and_reaches_every_page_by_keyboard(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    assert page.url == f"{url}/ui/"
    for number, title in enumerate(PAGES):
        page.keyboard.press("Tab")  # the link that skips to the content
        for _ in range(2 + number):  # the name, then the pages in order
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "title => document.querySelector('nav a[aria-current]')?.textContent === title", arg=title
        )
        assert page.title() == f"{title} · kvrelay"
        assert page.get_by_role("main").count() == 1


@pytest.mark.parametrize("dark", [False, True])
def test_no_page_is_wider_than_a_narrow_screen(url: str, open_page: OpenPage, dark: bool) -> None:
    page = open_page(f"{url}/ui/", NARROW, dark=dark)
    for title in PAGES:
        page.get_by_role("link", name=title, exact=True).click()
        page.wait_for_function(
            "title => document.querySelector('nav a[aria-current]')?.textContent === title", arg=title
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0], title


def test_injected_script_does_not_run(url: str, open_page: OpenPage) -> None:
    page = open_page(f"{url}/ui/", expect="Content Security Policy")
    ran = page.evaluate(
        """() => new Promise(resolve => {
            document.addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.injected = true";
            document.head.append(script);
        })"""
    )
    assert ran == "script-src-elem"
    assert page.evaluate("window.injected") is None


def test_an_answer_that_is_cut_off_is_a_failure_until_the_next_one(url: str, open_page: OpenPage) -> None:
    """The router was killed while it sent: the page logged an error and went on to say that all is live."""
    script = """
const ask = window.fetch;
window.cut = true;
window.fetch = (...all) => (window.cut ? Promise.resolve(new Response('{"nodes":')) : ask(...all));
"""
    page = open_page(f"{url}/ui/", script=script)
    page.wait_for_function(
        "() => document.querySelector('.status').textContent === \"the router's answer was cut off\""
    )
    page.evaluate("window.cut = false")
    page.wait_for_function("() => document.querySelector('.status').textContent === 'live'")
