"""Mutual TLS between the services of a cluster, from a folder of certificates (`common.security.certificates`).

Both ends show a certificate of the cluster's own authority, and its name says what they may be. Host names play no role.
Files that change are read again at the next connection: certificates are renewed and revoked without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import ConfigError
from common.security.names import CA, CERTIFICATE, KEY, REVOKED, host_of

log = logging.getLogger(__name__)


class Credentials:
    """This service's certificate, and what it needs to check those of others."""

    def __init__(self, folder: str) -> None:
        """Raises: ConfigError if a file is missing or unreadable, or key and certificate do not belong together."""
        self._folder = Path(folder)
        self._read()

    @property
    def folder(self) -> str:
        """The folder that they were read from."""
        return str(self._folder)

    def for_server(self) -> ssl.SSLContext:
        """The context of one connection to a listener: the client must show a certificate."""
        self._read_if_changed()
        return self._server

    def for_client(self) -> ssl.SSLContext:
        """The context of one connection to the server named `host_of(role)`."""
        self._read_if_changed()
        return self._client

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that only holders of this private key can derive, such as the hosts of one node."""
        try:
            return hmac.digest((self._folder / KEY).read_bytes(), purpose, hashlib.sha256)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def _read(self) -> None:
        versions = self._current_versions()
        server, client = self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        self._versions, self._server, self._client = versions, server, client

    def _read_if_changed(self) -> None:
        try:
            if self._current_versions() != self._versions:
                self._read()
                log.info("read the certificates in %s again", self._folder)
        except ConfigError as error:  # half of them may be new: the next connection tries again
            log.warning("%s; those from before are used", error)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # a resumed session would skip the check of a certificate
        try:
            context.load_verify_locations(str(self._folder / CA))
            context.load_verify_locations(str(self._folder / REVOKED))
            # Without a password, OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(str(self._folder / CERTIFICATE), str(self._folder / KEY), password="")
        except (OSError, ssl.SSLError) as error:
            raise _unusable(self._folder, error) from error
        return context

    def _current_versions(self) -> list[tuple[int, int]]:
        try:
            found = [(self._folder / file).stat() for file in (CA, CERTIFICATE, KEY, REVOKED)]
        except OSError as error:
            raise _unusable(self._folder, error) from error
        return [(status.st_mtime_ns, status.st_ino) for status in found]


def open_credentials(folder: str | None) -> Credentials | None:
    """The credentials in `folder` (`--tls-dir`); None without one. Raises: see `Credentials`."""
    return None if folder is None else Credentials(folder)


def shows_role(connection: ssl.SSLObject | ssl.SSLSocket, roles: Sequence[str]) -> bool:
    """Whether the other end's certificate, which has been verified, names one of these roles."""
    certificate = connection.getpeercert() or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    return not names.isdisjoint(map(host_of, roles))


def why_refused(error: OSError) -> str:
    """Why a connection over TLS failed, in a few words; for a certificate, what is wrong with it."""
    found = getattr(error, "verify_message", None) or getattr(error, "reason", None) or str(error)[:200]
    return str(found or type(error).__name__)


def _unusable(folder: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    file = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return ConfigError(f"the certificates in {folder} cannot be used: {reason}{file}")
