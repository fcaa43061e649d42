"""Fixtures of the tests in a real browser: Debian's Chromium, driven by Playwright. `scripts/test -m browser` runs them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

WIDE, NARROW = (1280, 800), (400, 800)
OpenPage = Callable[..., Any]
"""(url, size=WIDE, dark=False, expect="", script="") -> a Playwright page that has loaded the URL. `expect`: text of errors that
it may log; `script`: JavaScript that runs before the page's own."""


@pytest.fixture
def open_page() -> Iterator[OpenPage]:
    """Opens pages in headless Chromium. The test fails if a page asks another host, logs an error or breaks its policy."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'"
    )
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    problems: list[str] = []
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox refuses to run as root, which tests in a container do.
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = driver.chromium.launch(
            executable_path=program, args=[*options, "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        )

        def open_at(
            url: str,
            size: tuple[int, int] = WIDE,
            *,
            dark: bool = False,
            expect: str = "",
            script: str = "",
            **context: Any,
        ) -> Any:
            viewport = {"width": size[0], "height": size[1]}
            page = browser.new_context(
                viewport=viewport, color_scheme="dark" if dark else "light", **context
            ).new_page()
            home = urlsplit(url).netloc
            page.set_default_timeout(20_000)
            page.on("request", lambda asked: _check_host(asked.url, home, problems))
            page.on("console", lambda said: _check_console(said, expect, problems))
            page.on("pageerror", lambda error: problems.append(f"error in the page: {error}"))
            if script:
                page.add_init_script(script)
            page.goto(url)
            return page

        yield open_at
        browser.close()
    assert not problems, problems


@pytest.fixture
def screenshots() -> Path | None:
    """Where tests leave screenshots: $SCREENSHOTS, or nowhere."""
    folder = os.environ.get("SCREENSHOTS")
    return None if folder is None else Path(folder)


def _check_host(url: str, home: str, problems: list[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != home:
        problems.append(f"a request left the host: {url}")


def _check_console(said: Any, expect: str, problems: list[str]) -> None:
    # Chromium logs every answer that is an error; the pages show them.
    if expect and expect in said.text:
        return
    if said.type in ("error", "warning") and "Failed to load resource" not in said.text:
        problems.append(f"console: {said.text}")
