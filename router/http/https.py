"""The certificate that clients of the HTTP API see. Router process, event loop."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from common.base.errors import ConfigError

log = logging.getLogger(__name__)


class HttpsCertificate:
    """A certificate and its key in files, read again when they change: it is renewed without a restart."""

    def __init__(self, certificate: str, key: str | None) -> None:
        """Raises: ConfigError if the files cannot be used."""
        self._certificate, self._key = certificate, key
        self._versions = self._current_versions()
        self._latest = self._load()

    def make_context(self, *_: object) -> ssl.SSLContext:
        """The TLS context of one connection, with the certificate that the files hold now; uvicorn's `ssl_context_factory`."""
        try:
            versions = self._current_versions()
            if versions != self._versions:
                self._latest = self._load()
                self._versions = versions
                log.info("read the certificate in %s again", self._certificate)
        except ConfigError as error:  # half of them may be new: the next connection tries again
            log.warning("%s; the one from before is used", error)
        return self._latest

    def _current_versions(self) -> list[tuple[int, int]]:
        try:
            found = [Path(file).stat() for file in (self._certificate, self._key or self._certificate)]
        except OSError as error:
            raise self._unusable(error) from error
        return [(status.st_mtime_ns, status.st_ino) for status in found]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key, password="")  # without one, OpenSSL asks the terminal
        except OSError as error:  # ssl.SSLError is one
            raise self._unusable(error) from error
        return context

    def _unusable(self, error: OSError) -> ConfigError:
        why: object = error
        if isinstance(error, ssl.SSLError):
            why = "it and its key must be in PEM, the key without a passphrase"
            if error.reason == "KEY_VALUES_MISMATCH":
                why = "the key is of another one"
        return ConfigError(f"--ssl-certfile {self._certificate} cannot be used: {why}")


def https_certificate(certificate: str | None, key: str | None) -> HttpsCertificate | None:
    """The certificate of the HTTP API; None without `--ssl-certfile`. Raises: ConfigError."""
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    return HttpsCertificate(certificate, key)
