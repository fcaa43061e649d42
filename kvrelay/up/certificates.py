"""Certificates for one run of `kvrelay up --tls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from common.security.names import ServiceRole
from common.security.tls import Credentials
from kvrelay.up.plan import ChildSpec, resolved_child

_DAYS = 3650
_ROLES: dict[str, ServiceRole] = {"router": "router", "prefill": "node", "decode": "node", "pooling": "node"}


def refuse_given(specs: Sequence[ChildSpec], environ: Mapping[str, str]) -> None:
    """Raises: ConfigError if services would use certificates that the supervisor does not know."""
    for spec in specs:
        child = resolved_child(spec, environ) if spec.role in _ROLES else None
        if child is not None and child.config.tls_dir is not None:
            by_variable = child.sources["tls_dir"] == "environment"
            given = "KVRELAY_TLS_DIR" if by_variable else "tls_dir in the configuration file"
            raise ConfigError(f"{given} is for services that are started one by one: leave it out, or use --tls")


def with_certificates(specs: list[ChildSpec], directory: Path) -> tuple[list[ChildSpec], Credentials]:
    """The services with a folder each, made in `directory`, that holds their certificate; and those of the supervisor.

    Raises: ConfigError if the package that makes certificates is missing.
    """
    try:
        from common.security.certificates import Authority
    except ImportError as error:
        raise ConfigError("--tls needs the package `cryptography`: pip install 'kvrelay[tls]'") from error
    authority = Authority.create(directory / "ca")
    changed: list[ChildSpec] = []
    for spec in specs:
        role = _ROLES.get(spec.role)
        if role is not None:
            authority.issue(spec.name, role, directory / spec.name, _DAYS)
            spec = replace(spec, environ={**spec.environ, "KVRELAY_TLS_DIR": str(directory / spec.name)})
        changed.append(spec)
    authority.issue("kvrelay up", "router", directory / "up", _DAYS)
    return changed, Credentials(str(directory / "up"))
