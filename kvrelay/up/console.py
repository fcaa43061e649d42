"""Terminal output of `kvrelay up`: each child's lines with its name, and the supervisor's own. Main thread."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import TextIO

from common.base.logs import LogFormat
from common.base.output import Output
from common.base.sentences import counted
from kvrelay.up.restarts import describe_exit
from kvrelay.up.trials import Trial

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_OWN_NAME = "kvrelay"


class Console:
    """Writes prefixed lines to `out`. Once the reader of `out` is gone, it writes nothing, without an error. Lines that cannot
    be written (a full disk, a reader that does not read) are lost; their number is written once there is room again."""

    def __init__(self, names: list[str], out: TextIO | None = None, form: LogFormat = "text") -> None:
        """form: `json` writes every line as a JSON object with the name as `service`."""
        stream = out if out is not None else sys.stdout
        self._out = Output(stream)
        self._as_json = form == "json"
        self._width = max(map(len, [_OWN_NAME, *names]))
        self._lost = 0
        coloured = stream.isatty() and "NO_COLOR" not in os.environ
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)} if coloured else {}

    def child_line(self, name: str, line: str) -> None:
        """One line of a child's output."""
        if self._as_json:
            self._json(name, line)
            return
        prefix = f"{name:<{self._width}} |"
        colour = self._colours.get(name)
        self.plain(f"\x1b[{colour}m{prefix}\x1b[0m {line}" if colour else f"{prefix} {line}")

    def log_line(self, text: str) -> None:
        """One message of the log of the supervisor's process; one with a traceback has several lines."""
        for line in text.split("\n"):
            self.say(line)

    def say(self, line: str) -> None:
        """One line of the supervisor."""
        self.child_line(_OWN_NAME, line)

    def _json(self, name: str, line: str) -> None:
        service = json.dumps({"service": name})
        if line.startswith('{"'):  # a log line of the service
            self.plain(f"{service[:-1]}, {line[1:]}")
        else:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.plain(json.dumps({"service": name, "time": time, "message": line}, ensure_ascii=False))

    def announce(self, text: str, summary: str) -> None:
        """A text of several lines; as JSON `summary` instead."""
        if self._as_json:
            self._json(_OWN_NAME, summary)
        else:
            self.plain(text)

    def plain(self, text: str) -> None:
        try:
            if self._lost:
                lost, self._lost = self._lost, 0
                self.say(f"{counted(lost, 'line')} could not be written")
                if self._lost:
                    self._lost = lost
            self._out.write(text + "\n")
        except (BrokenPipeError, ValueError):
            self._out = Output(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (lives as long as the process)
        except OSError:
            self._lost += 1


def banner(
    urls: list[str],
    models: Collection[str],
    tried: Sequence[Trial],
    rows: list[tuple[str, int, str]],
    kernels: list[str],
    needs_key: bool,
    took_s: float,
) -> str:
    """The text shown once everything is ready. `urls`: the routers' APIs; `tried`: requests to show; `rows`: (name,
    pid, address) of each child; `kernels`: what computes, as the nodes report it, each once."""
    name_width = max(len(name) for name, _, _ in rows)
    pid_width = max(len(str(pid)) for _, pid, _ in rows)
    listing = "\n".join(f"  {name:<{name_width}}  pid {pid:<{pid_width}}  {address}" for name, pid, address in rows)
    key = ' -H "Authorization: Bearer $KVRELAY_API_KEY"' if needs_key else ""
    url = urls[0]
    lines = [
        f"Try {each.shows or 'it'}:\n\n  curl {url}{each.path}{key} -H 'Content-Type: application/json' \\\n    -d {each.word}"
        for each in tried
    ]
    shown = "\n\n".join(lines)
    return f"""
kvrelay is ready at {", ".join(urls)} (after {took_s:.1f} s), serving the model{"s" * (len(models) > 1)} {", ".join(models)}:

{listing}

Kernels: {"; ".join(kernels)}

{shown}

The API is described at {url}/docs. `kvrelay admin nodes` shows what each node does. Ctrl-C stops everything.
"""


def failure_line(name: str, return_code: int, last_line: str) -> str:
    """One sentence about why the start failed."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # it is no JSON log line
        last_line = str(json.loads(last_line)["message"])
    reason = last_line.removeprefix("kvrelay: ") or "no output"
    return f"{name} could not start ({describe_exit(return_code)}): {reason}"
