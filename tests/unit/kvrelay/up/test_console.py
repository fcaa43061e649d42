from __future__ import annotations

import errno
import io
import json
import logging
import os
import re

import pytest

from common.base import logs
from kvrelay.up.console import Console, banner, failure_line
from kvrelay.up.trials import Trial


def shown(*tried: Trial, needs_key: bool = False) -> str:
    rows = [("router-0", 1, "http://a"), ("prefill-0", 22, "tcp://b")]
    kernels = ["PyTorch (no C++ compiler found)", "native avx2, 2 threads"]
    return banner(["http://a"], {"demo": "generate"}, tried, rows, kernels, needs_key, 1.0)


def test_the_banner_names_addresses_processes_and_kernels() -> None:
    text = shown()
    assert "kvrelay is ready at http://a (after 1.0 s), serving the model demo" in text
    assert "  prefill-0  pid 22  tcp://b" in text
    assert "Kernels: PyTorch (no C++ compiler found); native avx2, 2 threads" in text


def test_the_banner_shows_each_request_as_a_line_of_curl() -> None:
    text = shown(Trial("/v1/x", "'{}'"), Trial("/v1/y", "'[]'", "a relay"), needs_key=True)
    key = '-H "Authorization: Bearer $KVRELAY_API_KEY"'
    assert f"Try it:\n\n  curl http://a/v1/x {key} -H 'Content-Type: application/json' \\\n    -d '{{}}'\n" in text
    assert f"Try a relay:\n\n  curl http://a/v1/y {key}" in text


class FullDisk(io.StringIO):
    """Has room only while `has_room`."""

    has_room = False

    def write(self, text: str) -> int:
        if not self.has_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_that_a_full_disk_does_not_take_are_lost_and_counted() -> None:
    """`kvrelay up >> log` on a full disk once ended with all its services at the next line."""
    disk = FullDisk()
    console = Console(["router"], disk)
    console.say("lost")
    console.child_line("router", "lost too")
    disk.has_room = True
    console.say("kept")
    assert disk.getvalue().splitlines() == ["kvrelay | 2 lines could not be written", "kvrelay | kept"]


def test_a_console_whose_reader_is_gone_is_silent() -> None:
    out = io.StringIO()
    console = Console([], out)
    out.close()
    console.say("nobody reads this")
    console.say("nor this")


def test_as_json_every_line_is_an_object_that_names_its_service() -> None:
    out = io.StringIO()
    console = Console(["d0"], out, "json")
    console.child_line("d0", '{"level": "info", "message": "ready"}')
    console.child_line("d0", "not from the log")
    console.say("stopping")
    console.announce("several\nlines", "ready")
    first, *others = map(json.loads, out.getvalue().splitlines())
    assert first == {"service": "d0", "level": "info", "message": "ready"}
    assert [(each["service"], each["message"]) for each in others] == [
        ("d0", "not from the log"),
        ("kvrelay", "stopping"),
        ("kvrelay", "ready"),
    ]


def test_lines_of_the_supervisors_own_log_have_its_name() -> None:
    for form in ("text", "json"):
        out = io.StringIO()
        logs.configure("info", form, Console(["decode-0"], out, form).log_line)
        logging.getLogger("common.cluster.membership").warning("Redis is away")
        [line] = out.getvalue().splitlines()
        if form == "text":
            assert line.startswith("kvrelay  | ")
            assert line.endswith(" WARNING common.cluster.membership: Redis is away")
        else:
            assert (found := json.loads(line))["service"] == "kvrelay"
            assert found["message"] == "Redis is away"


def test_every_line_of_a_traceback_in_that_log_has_its_name() -> None:
    out = io.StringIO()
    logs.configure("info", "text", Console(["decode-0"], out).log_line)
    try:
        raise ValueError("a bug")
    except ValueError:
        logging.getLogger("kvrelay.up").exception("failed")
    shown = out.getvalue().splitlines()
    assert len(shown) > 2
    assert all(line.startswith("kvrelay  | ") for line in shown)


@pytest.mark.parametrize("last_line", ["kvrelay: no model", '{"level": "error", "message": "no model"}', "no model"])
def test_a_failed_start_gives_the_childs_reason(last_line: str) -> None:
    assert failure_line("d0", 78, last_line).endswith(": no model")


def test_a_reader_that_stands_still_loses_lines_and_holds_nothing() -> None:
    """`kvrelay up | less` once stopped at the first line that the pipe had no room for, and soon all services with it."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as reader, os.fdopen(writing, "w") as out:
        console = Console(["router"], out)
        for _ in range(2000):
            console.child_line("router", "x" * 100)
        reader.read(1 << 20)
        console.say("kept")
        *_, count, kept = reader.read(1 << 20).decode().splitlines()
    assert re.fullmatch(r"kvrelay \| \d+ lines could not be written", count)
    assert kept == "kvrelay | kept"


def test_a_line_that_the_encoding_lacks_is_escaped_and_ends_nothing() -> None:
    """A folder's name that was not UTF-8 once silenced the console for good."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as reader, os.fdopen(writing, "w", encoding="utf-8") as out:
        console = Console([], out)
        console.say("caf\udce9")
        console.say("next")
        assert reader.read(1 << 20).decode().splitlines() == ["kvrelay | caf\\udce9", "kvrelay | next"]
