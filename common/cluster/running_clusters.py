"""Files by which `kvrelay admin` finds the clusters that `kvrelay up` runs on this machine: one per cluster.

A file contains the admin token, so its folder is readable by its user only. Pure except for the file system.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from common.base.errors import ConfigError
from common.base.files import temporary_folder, write_whole
from common.base.process import start_ticks

log = logging.getLogger(__name__)

_FILES = "up-*.json"


@dataclass(frozen=True)
class RunningCluster:
    """One cluster of `kvrelay up`."""

    pid: int
    """Process id of the supervisor."""
    routers: dict[str, str]
    """Router URL for clients -> its admin URL; never empty."""
    token: str
    started_ticks: int | None = None
    """When that process started, by `start_ticks`."""

    @property
    def url(self) -> str:
        """URL for clients of the first router."""
        return next(iter(self.routers))


def runtime_folder(environ: Mapping[str, str]) -> Path:
    """Folder of the files: below $XDG_RUNTIME_DIR, or a folder of this user below the temporary folder."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvrelay" if base else temporary_folder() / f"kvrelay-{os.getuid()}"


@contextlib.contextmanager
def announced(cluster: RunningCluster, folder: Path) -> Generator[None]:
    """Keep a file about `cluster` in `folder` until the block ends.

    If that is not possible, log a warning: `kvrelay admin` then needs its URL and token.
    """
    path = folder / f"up-{cluster.pid}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        write_whole(path, json.dumps(asdict(cluster)).encode(), private=True)
        for file in folder.glob(_FILES):
            if _read_running(file) is None:
                file.unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        log.warning("`kvrelay admin` cannot find this cluster by itself: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def running_clusters(folder: Path) -> list[RunningCluster]:
    """The clusters whose supervisors are alive, by file name; none if other users can access the folder."""
    try:
        _check_private(folder)
    except (OSError, ConfigError):
        return []
    return [cluster for file in sorted(folder.glob(_FILES)) if (cluster := _read_running(file)) is not None]


def _check_private(folder: Path) -> None:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder that only this user can access; set XDG_RUNTIME_DIR to another one"
        )


def _read_running(file: Path) -> RunningCluster | None:
    """The cluster that this file is about; None if the file is damaged, or the supervisor does not run."""
    try:
        cluster = RunningCluster(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return cluster if _runs(cluster) else None


def _runs(cluster: RunningCluster) -> bool:
    """Whether its supervisor runs, and not another process that has got its id."""
    try:
        os.kill(cluster.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return cluster.started_ticks in (None, start_ticks(cluster.pid))
