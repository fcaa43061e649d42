"""The folder with the files of one `kvrelay up`: certificates, a copy of the configuration, Redis' data."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from common.base.files import temporary_folder, try_lock
from common.config.sources import CONFIG_FILE_VARIABLE
from kvrelay.up.plan import ChildSpec

_PREFIX = "kvrelay-up-"
_MARK = "locked"
"""A file that says that the folder is locked as long as its `kvrelay up` runs."""


@contextlib.contextmanager
def run_folder() -> Generator[Path]:
    """A new folder below the temporary folder, removed at the end.

    Children that are restarted after weeks still read it, so it is locked: systemd-tmpfiles, which removes old files from
    /tmp, leaves locked folders alone. $XDG_RUNTIME_DIR would be no better place: it ends when the user logs out. Folders of
    this user's runs that were killed are removed.
    """
    _remove_dead()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_folder()))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            if try_lock(descriptor, shared=True):
                (folder / _MARK).touch()
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_dead() -> None:
    for mark in temporary_folder().glob(f"{_PREFIX}*/{_MARK}"):
        with contextlib.suppress(OSError):
            if os.lstat(mark.parent).st_uid != os.getuid():
                continue
            descriptor = os.open(mark.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(mark.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def with_config_copy(specs: list[ChildSpec], directory: str) -> list[ChildSpec]:
    """Give the children a copy of the configuration file as it is now, for every restart.

    Raises: ConfigError if the file cannot be copied.
    """
    file = os.environ.get(CONFIG_FILE_VARIABLE)
    if not file:
        return specs
    try:
        kept = shutil.copyfile(file, os.path.join(directory, "kvrelay.toml"))
    except (OSError, shutil.SpecialFileError) as error:
        raise ConfigError(f"{file} cannot be copied for the services, it must be a regular file: {error}") from error
    return [replace(spec, environ={**spec.environ, CONFIG_FILE_VARIABLE: kept}) for spec in specs]
