"""Names in certificates, for issuing and for checking them. Pure."""

from __future__ import annotations

from typing import Literal, get_args

CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "cert.pem", "key.pem", "crl.pem"
"""Files in a service's folder."""


ServiceRole = Literal["router", "node", "admin"]
ROLES: tuple[str, ...] = get_args(ServiceRole)


def host_of(role: str) -> str:
    """The DNS name in a certificate of this role: it decides what a service may be; host names do not matter."""
    return f"{role}.kvrelay"
