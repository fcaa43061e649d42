"""A process that has imported what nodes need, PyTorch above all, or what routers need, and forks itself for each of them that
`kvrelay up` starts: importing takes seconds of processor time. `kvrelay.up.fork_client` starts it and talks to it.

A forked service is a child of the supervisor like any other, because the process between them ends at once and the supervisor
adopts its orphans. Services outlive this process.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common.base.process import (
    die_with_parent,
    lasting_imports,
    module_command,
    prepare_compute,
    run_and_end,
    set_command_line,
)
from kvrelay.command import commands, main

MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 1 << 16, 1 << 8
_REPLACED = "installed files were replaced since it started"


def serve(channel: socket.socket, preloaded: Sequence[str]) -> None:
    """Import what the commands `preloaded` need, by the function `preload` of their modules. Then, until the supervisor
    closes its end of `channel`, answer each request with the pid of a new process, or with the reason why there is none: after
    an upgrade, a forked service would be a mixture of what is imported here and of new files.

    A request is a JSON list [argv, environment variables to add, path of the model whose tokenizer is shared or ""] and the
    descriptor of the process's output; argv is the command of the new process: python -m kvrelay, and the arguments of
    `kvrelay`.
    """
    with lasting_imports():
        for name in preloaded:
            importlib.import_module(commands()[name].module).preload()
        from common.engine.grammar.shared_tokenizers import share_tokenizer
    imported = _imported_files()
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 1)
        if not data:
            return
        argv, environ, model_path = json.loads(data)
        (output,) = descriptors
        if any(_state(file) != state for file, state in imported.items()):
            answer = _REPLACED
        else:
            if model_path:
                share_tokenizer(Path(model_path))
            answer = str(_fork_orphan(partial(_be_service, channel, argv, environ, output)) or "it forks no process")
        os.close(output)
        channel.send(answer.encode())


def _imported_files() -> dict[str, tuple[int, int] | None]:
    """The files of all modules that are imported, and their state."""
    names = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    return {name: _state(name) for name in names if isinstance(name, str)}


def _state(file: str) -> tuple[int, int] | None:
    """A value that changes when the file is written or replaced; None if there is no file."""
    try:
        about = os.stat(file)
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino


def _fork_orphan(run: Callable[[int], None]) -> int:
    """Fork a process that calls `run(pid of its parent)` and ends. When this returns, it has lost that parent.

    Returns its pid, 0 if there is none.
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                parent_pid = os.getpid()
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    os.close(writing)
                    run_and_end(lambda: run(parent_pid))
                os.write(writing, str(pid).encode())
            finally:
                os._exit(0)
        os.waitpid(between, 0)
    except OSError:
        return 0
    finally:
        os.close(writing)
        with os.fdopen(reading, "rb", 0) as pipe:
            answer = pipe.read(32)
    return int(answer or 0)


def _be_service(channel: socket.socket, argv: list[str], environ: dict[str, str], output: int, parent_pid: int) -> None:
    while os.getppid() == parent_pid:  # until the supervisor is the parent
        time.sleep(0.001)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    channel.close()
    os.environ.update(environ)
    set_command_line(argv)
    sys.argv = ["kvrelay", *argv[argv.index("kvrelay") + 1 :]]
    main()


if __name__ == "__main__":
    die_with_parent()
    set_command_line(module_command("kvrelay.up.fork_server", sys.argv[2]))
    prepare_compute(None, nice=0)
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split())
