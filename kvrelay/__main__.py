"""The console script `kvrelay`, also `python -m kvrelay`: it runs `kvrelay.command`.

Ctrl-C ends it at once, without a traceback, while it imports the command line.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Console script."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # unless it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvrelay.command import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()


if __name__ == "__main__":
    main()
