"""Signatures by a service's own key, checked like its certificate on a connection. Needs the package `cryptography`.

Used where a message passes through another program, such as Redis. Runs on the asyncio loop of a process, rarely: at a node's
start, and once for each new record at its readers.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from common.base.errors import ConfigError, ProtocolError
from common.security.names import CA, CERTIFICATE, KEY, REVOKED, host_of

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError as error:
    raise ConfigError("--tls-dir needs the package `cryptography`: pip install 'kvrelay[tls]'") from error

_PURPOSE = b"kvrelay signature 1\0"
_CRL = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


class Signer:
    """Signs with the key in a service's folder, and checks what others of the same authority signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signed_with: tuple[int, ...] = ()
        """When the files of the last signature changed."""

    @property
    def is_renewed(self) -> bool:
        """Whether the folder has another key or certificate than that of the last signature."""
        try:
            return self._changed_at() != self._signed_with
        except OSError:  # one is being replaced
            return False

    def sign(self, content: bytes) -> tuple[bytes, bytes]:
        """The certificate (PEM) and the signature. Raises: ConfigError if the folder's files cannot be used, for example
        because only one of them is replaced yet."""
        try:
            changed_at = self._changed_at()
            key = serialization.load_pem_private_key((self._folder / KEY).read_bytes(), None)
            certificate = (self._folder / CERTIFICATE).read_bytes()
            public = x509.load_pem_x509_certificate(certificate).public_key()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the key in {self._folder} cannot be used: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{self._folder / KEY} is not a key that `kvrelay keys` made")
        if public != key.public_key():
            raise ConfigError(f"{self._folder / KEY} is not the key of {CERTIFICATE} beside it")
        self._signed_with = changed_at
        return certificate, key.sign(_PURPOSE + content, ec.ECDSA(hashes.SHA256()))

    def _changed_at(self) -> tuple[int, ...]:
        return tuple((self._folder / name).stat().st_mtime_ns for name in (KEY, CERTIFICATE))

    def check(self, content: bytes, certificate: bytes, signature: bytes, role: str) -> None:
        """Check a signature. Raises: ProtocolError unless a service of this role made it, with a certificate that is valid now."""
        try:
            signer = x509.load_pem_x509_certificate(certificate)
            authorities = x509.load_pem_x509_certificates((self._folder / CA).read_bytes())
            lists = _CRL.findall((self._folder / REVOKED).read_bytes())
            revoked = [x509.load_pem_x509_crl(each) for each in lists or (b"",)]
            if not any(has_issued(authority, signer) for authority in authorities):
                raise InvalidSignature
            names = signer.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = names.get_values_for_type(x509.DNSName)
            key = signer.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ProtocolError("its certificate has a key of another kind")
            key.verify(signature, _PURPOSE + content, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise ProtocolError("its signature is wrong, or its certificate is of another authority") from None
        except (OSError, ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise ProtocolError(f"its signature cannot be checked: {str(error)[:200]}") from None
        now = datetime.datetime.now(datetime.UTC)
        if now < signer.not_valid_before_utc:
            raise ProtocolError("its certificate is not valid yet: are the clocks of both hosts right?")
        if now > signer.not_valid_after_utc:
            raise ProtocolError("its certificate has expired")
        if any(each.get_revoked_certificate_by_serial_number(signer.serial_number) is not None for each in revoked):
            raise ProtocolError("its certificate is revoked")
        if host_of(role) not in hosts:
            raise ProtocolError(f"its certificate is not of a {role}")


def has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether the authority has signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):  # another key, another name, another kind of key
        return False
    return True
