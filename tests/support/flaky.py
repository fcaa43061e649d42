"""Runs the failed tests of a run once more at its end, alone. One that passes then is printed as FLAKY, with both outputs.

A pytest plugin of the process that reports: with workers, of the one that started them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

MOST = 10
"""More failures than this have a common cause, and are not run again."""
_LONGEST_S = 600.0


@dataclass(frozen=True)
class Flaky:
    """A test that failed, and passed when it ran again."""

    nodeid: str
    failed: str
    passed: str


class FailedOnceMore:
    """The exit status is that of the last run of each test. Where `-x` has stopped a run, it stays a failed one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._flaky: list[Flaky] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Run them again, after all workers have ended."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if exitstatus != pytest.ExitCode.TESTS_FAILED or reporter is None:
            return
        failures = _failures(reporter)
        if len(failures) > MOST:
            reporter.write_line(f"\n{len(failures)} tests failed: not run again, because more than {MOST} did")
            return
        for nodeid, reports in failures.items():
            reporter.write_line(f"\nfailed, so it runs once more, alone: {nodeid}")
            passed = self._passes(nodeid)
            if passed is not None:
                self._flaky.append(Flaky(nodeid, "\n".join(map(_text, reports)), passed))
                for category in ("failed", "error"):
                    kept = [report for report in reporter.stats.get(category, []) if report not in reports]
                    reporter.stats[category] = kept
        reporter.stats["flaky"] = self._flaky
        is_complete = not (session.shouldfail or session.shouldstop)
        if is_complete and not reporter.stats["failed"] and not reporter.stats["error"]:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print both outputs of each flaky test."""
        for test in self._flaky:
            terminalreporter.section(f"FLAKY {test.nodeid}", red=True)
            terminalreporter.line(test.failed)
            terminalreporter.section("the same test, run again alone", sep="-")
            terminalreporter.line(test.passed)
        for test in self._flaky:
            terminalreporter.line(f"FLAKY {test.nodeid}")

    def _passes(self, nodeid: str) -> str | None:
        """The output of the test in a process of its own, if it passes there."""
        options = ["--once", "-m", "", "-rP", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command = [sys.executable, "-m", "pytest", *options, nodeid]
        done = subprocess.run(
            command, cwd=self._config.rootpath, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
        passed = done.returncode == 0 and " passed" in done.stdout.splitlines()[-1]
        return done.stdout + done.stderr if passed else None


def _failures(reporter: pytest.TerminalReporter) -> dict[str, list[pytest.TestReport]]:
    """Reports of set-up, call and end of each test that failed in one of them."""
    found: dict[str, list[pytest.TestReport]] = {}
    for report in [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]:
        if isinstance(report, pytest.TestReport):
            found.setdefault(report.nodeid, []).append(report)
    return found


def _text(report: pytest.TestReport) -> str:
    """Why it failed, and what it wrote."""
    parts = [f"failed in its {report.when}:", report.longreprtext]
    parts += [f"--- {title} ---\n{text}" for title, text in report.sections]
    return "\n".join(parts)
