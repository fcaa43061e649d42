"""Names that certificates and those who check them share. Pure."""

from __future__ import annotations

from typing import Literal, get_args

CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "cert.pem", "key.pem", "crl.pem"
"""Files in a service's folder."""


ServiceRole = Literal["router", "node", "admin"]
ROLES: tuple[str, ...] = get_args(ServiceRole)


def host_of(role: str) -> str:
    """The DNS name in a certificate of this role: who may be what depends on it, not on host names."""
    return f"{role}.kvrelay"
