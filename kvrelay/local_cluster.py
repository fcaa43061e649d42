"""A whole cluster as a child of this process: `kvrelay up` on free ports, for offline use and batches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from common.base.errors import ConfigError, KvRelayError
from common.base.files import temporary_folder
from common.base.process import module_command
from common.config.fields import api_keys
from common.config.sources import SUPERVISOR_VARIABLE

_POLL_S = 0.05
_STOP_S = 30.0
"""Time for the services to end in order, before they are killed."""


def own_key(api_key: str) -> str:
    """The key to send to a cluster of one's own, whose router takes any of those in the option `api_key`."""
    return next(iter(api_keys(api_key)), "")


class ClusterFailed(KvRelayError):
    """The cluster could not start, or ended by itself."""


class LocalCluster:
    """A running cluster, until `close` or the end of this process, however it ends."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start `kvrelay up` with these arguments and wait until it is ready; `up` has the time limit.

        Raises: ConfigError or ClusterFailed with the reason that it gave.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-cluster-", dir=temporary_folder())
        self._pid_file, self._log_file = (Path(self._folder.name, name) for name in ("pids.json", "log"))
        own = ["--host", "127.0.0.1", "--port", "0", "--routers", "1", "--pid-file", str(self._pid_file)]
        self._command = module_command("kvrelay", "up", *arguments, *own)
        self._starting: Future[subprocess.Popen[bytes]] = Future()
        # The kernel ends the cluster with the thread that started it, so that thread lives as long as the cluster.
        threading.Thread(target=self._run, name="cluster", daemon=True).start()
        self._process = self._starting.result()
        try:
            self.url = self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        environ = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
        try:
            with self._log_file.open("wb") as log:
                # In a session of its own, so that Ctrl-C reaches this process only, which then stops the cluster.
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    start_new_session=True,
                )
        except BaseException as error:
            self._starting.set_exception(error)
            return
        self._starting.set_result(process)
        process.wait()

    def _wait_ready(self) -> str:
        while self._process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                entries = json.loads(self._pid_file.read_text("utf-8"))
                return next(str(entry["address"]) for entry in entries if entry["role"] == "router")
            time.sleep(_POLL_S)
        raise self.failure()

    def failure(self) -> KvRelayError:
        """Why the cluster is gone, as its last line of output says."""
        lines = self._log_file.read_text("utf-8", errors="replace").splitlines() or ["no output"]
        reason = lines[-1].removeprefix("kvrelay: ")
        kind = ConfigError if self._process.poll() == ConfigError.exit_code else ClusterFailed
        return kind(f"the local cluster ended: {reason}")

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop all services in order. A second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
