"""The console script `kvrelay`. Ctrl-C ends it at once, without a traceback, while it imports the command line."""

from __future__ import annotations

import signal


def main() -> None:
    """Console script."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # unless it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from common.cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()
