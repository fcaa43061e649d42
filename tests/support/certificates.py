"""Certificates for tests, made once for the whole run."""

from __future__ import annotations

import atexit
import datetime
import functools
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

from common.security.certificates import Authority
from common.security.names import ServiceRole


@functools.cache
def made() -> Path:
    """A folder with the certificates of `router`, `node` and `admin`, an `expired`, an `early` and a `revoked` node, and a `stranger` of
    another authority. `early` is not valid until tomorrow.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    authority = Authority.create(folder / "ca")
    authority.issue("revoked", "node", folder / "revoked", 1)
    authority.revoke("revoked")
    roles: list[ServiceRole] = ["router", "node", "admin"]
    for role in roles:
        authority.issue(role, role, folder / role, 1)
    authority.issue("expired", "node", folder / "expired", 0)
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    with patch("common.security.certificates._now", lambda: tomorrow):
        authority.issue("early", "node", folder / "early", 1)
    Authority.create(folder / "other").issue("stranger", "node", folder / "stranger", 1)
    return folder
