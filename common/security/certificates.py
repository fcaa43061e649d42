"""A cluster's own certificate authority, and the certificates of its services. Needs the package `cryptography`.

Every service has a folder of four files, which `common.security.tls` reads:

    ca.pem     the authority's certificate
    cert.pem   the service's certificate
    key.pem    its private key
    crl.pem    what the authority has revoked

The authority's folder has `ca.pem`, `ca-key.pem` and `crl.pem`, and under `issued/` a copy of every certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.base.errors import ConfigError
from common.base.files import write_whole
from common.security.names import CA, CERTIFICATE, KEY, REVOKED, ServiceRole, host_of
from common.security.signatures import has_issued

_T = TypeVar("_T")
_CA_KEY, _ISSUED = "ca-key.pem", "issued"
_CA_DAYS = 3650
_BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of hosts differ."""
_write = partial(write_whole, private=True)
"""Services may read the files at any time."""
_PEM_PART = re.compile(rb"-----BEGIN [^-]+-----.+?-----END [^-]+-----\s*", re.S)


class Authority:
    """A certificate authority in a folder; only the operator can read its key."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError if the folder holds none."""
        self.folder = folder
        try:
            self._certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
            key = load_pem_private_key((folder / _CA_KEY).read_bytes(), None)
        except PermissionError as error:
            raise ConfigError(f"cannot read the certificate authority: {error.filename}: {error.strerror}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} holds no certificate authority: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / _CA_KEY} is not a key that `kvrelay keys init` made")
        self._key = key

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder holds a complete authority, or one that has issued certificates."""
        return (folder / REVOKED).exists() or any((folder / _ISSUED).glob("*.pem"))

    @classmethod
    def create(cls, folder: Path) -> Authority:
        """Create an authority; one whose creation was interrupted is replaced. Raises: ConfigError if there is one already, or the folder
        cannot be written."""
        if cls.is_in(folder):
            raise ConfigError(f"{folder} holds a certificate authority already")
        key = ec.generate_private_key(ec.SECP256R1())
        with _writing(folder):
            (folder / _ISSUED).mkdir(parents=True, exist_ok=True)
            _write(folder / _CA_KEY, _pem(key))
            _write(folder / CA, _of_authority(key).public_bytes(Encoding.PEM))
        authority = cls(folder)
        authority._publish_revoked(x509.CertificateRevocationListBuilder())
        return authority

    @property
    def ends(self) -> datetime.datetime:
        """When its certificate expires, and with it every certificate that it has issued."""
        return self._certificate.not_valid_after_utc

    def renew(self) -> None:
        """Make a new certificate of the same key and name: what the authority has issued is valid with either one.

        Its `ca.pem` and `crl.pem` have to reach every service's folder. Raises: ConfigError if a file cannot be read or written.
        """
        revoked = self._revoked()[1]
        self._certificate = _of_authority(self._key)
        with _writing(self.folder):
            self._publish_revoked(revoked)
            _write(self.folder / CA, self._certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str, role: ServiceRole, folder: Path, days: int) -> bool:
        """Write a new key and certificate of a service into `folder`; they replace earlier ones.

        Returns whether it ends before `days` have passed, because the authority ends then. Raises: ConfigError if the folder
        cannot be written, or the authority has ended.
        """
        wanted = _now() + datetime.timedelta(days=days)
        if self.ends <= _now():
            raise ConfigError(f"the authority in {self.folder} ended on {self.ends:%Y-%m-%d}: `kvrelay keys renew` it")
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(name), self._certificate.subject, key.public_key(), min(wanted, self.ends))
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host_of(role))]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        encoded = certificate.public_bytes(Encoding.PEM)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / _ISSUED / f"{certificate.serial_number:x}.pem", encoded)
            for file in (CA, REVOKED):
                _write(folder / file, (self.folder / file).read_bytes())
            _write(folder / KEY, _pem(key))
            _write(folder / CERTIFICATE, encoded)
        return wanted - self.ends > datetime.timedelta(hours=1)

    def issued(self, folder: Path) -> bool:
        """Whether it has issued the certificate in a service's folder, revoked or not. Raises: ConfigError if that is unreadable."""
        return has_issued(self._certificate, _read(folder / CERTIFICATE, x509.load_pem_x509_certificate))

    def revoke(self, name: str) -> int:
        """Revoke all certificates of a service; the new `crl.pem` has to reach every service's folder.

        Returns how many were not revoked yet. Raises: ConfigError if it has issued none for the service, or a file of the
        authority cannot be read or written.
        """
        known, builder = self._revoked()
        issued = [_read(file, x509.load_pem_x509_certificate) for file in (self.folder / _ISSUED).glob("*.pem")]
        serials = [each.serial_number for each in issued if each.subject == _name(name)]
        if not serials:
            raise ConfigError(f"{self.folder} has issued no certificate for {name!r}")
        new = [serial for serial in serials if known.get_revoked_certificate_by_serial_number(serial) is None]
        for serial in new:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_now()).build()
            builder = builder.add_revoked_certificate(entry)
        if new:
            with _writing(self.folder / REVOKED):
                self._publish_revoked(builder)
        return len(new)

    def copy_revoked(self, folder: Path) -> None:
        """Renew the list of revoked certificates in a service's folder; that of another authority stays. Raises: OSError."""
        self._renew_part(folder / REVOKED, self._signed_list)

    def copy_all(self, folder: Path) -> None:
        """Renew the authority's certificate in a service's folder. Raises: OSError."""
        self._renew_part(folder / CA, self._has_key)
        self.copy_revoked(folder)

    def _renew_part(self, file: Path, is_own: Callable[[bytes], bool]) -> None:
        parts = [(self.folder / file.name).read_bytes()]
        for part in _PEM_PART.findall(file.read_bytes()) if file.exists() else ():
            with contextlib.suppress(ValueError):  # broken ones are left out
                if not is_own(part):
                    parts.append(part)
        _write(file, b"".join(parts))

    def _has_key(self, certificate: bytes) -> bool:
        return x509.load_pem_x509_certificate(certificate).public_key() == self._key.public_key()

    def _signed_list(self, revoked: bytes) -> bool:
        found = x509.load_pem_x509_crl(revoked)
        try:
            return found.is_signature_valid(self._key.public_key())
        except TypeError:  # it is signed by a key of another kind
            return False

    def _revoked(self) -> tuple[x509.CertificateRevocationList, x509.CertificateRevocationListBuilder]:
        """The list of revoked certificates, and a new one that begins with these. Raises: ConfigError."""
        known = _read(self.folder / REVOKED, x509.load_pem_x509_crl)
        builder = x509.CertificateRevocationListBuilder()
        for entry in known:
            builder = builder.add_revoked_certificate(entry)
        return known, builder

    def _publish_revoked(self, builder: x509.CertificateRevocationListBuilder) -> None:
        now = _now()
        built = (
            builder.issuer_name(self._certificate.subject)
            .last_update(now - _BACKDATED)
            .next_update(now + datetime.timedelta(days=_CA_DAYS))
            # By its key: authorities have the same name, and OpenSSL would take the list of another one in `crl.pem`.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(self.folder / REVOKED, built.public_bytes(Encoding.PEM))


def _of_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name, public = _name("kvrelay certificate authority"), key.public_key()
    return (
        _builder(name, name, public, _now() + datetime.timedelta(days=_CA_DAYS), is_authority=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    until: datetime.datetime,
    *,
    is_authority: bool = False,
) -> x509.CertificateBuilder:
    """Builds what all certificates have."""
    unused = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=is_authority, crl_sign=is_authority, **dict.fromkeys(unused, False)
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(common_name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    except ValueError as error:
        raise ConfigError(f"{common_name!r} cannot be the name in a certificate: {error}") from error


def _read(path: Path, parse: Callable[[bytes], _T]) -> _T:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _writing(place: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {place}: {error.strerror}") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
