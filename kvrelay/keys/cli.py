"""`kvrelay keys`: the certificates with which the services of a cluster know each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from common.base.errors import ConfigError
from common.base.sentences import counted
from common.config.cli import command_group
from common.security.names import CA, CERTIFICATE, REVOKED, ROLES, ServiceRole

if TYPE_CHECKING:
    from common.security.certificates import Authority

_HELP = """Make, renew and revoke the certificates with which the services of a cluster know each other (--tls-dir).

FOLDER holds the certificate authority in `ca`, which stays with the operator, and a folder for each service, which goes
to the host that runs it. Running services read changed files at their next connection.
"""
_DAYS, _MAX_DAYS = 365, 36_500
_SERVICES: dict[str, ServiceRole] = {"router": "router", "prefill": "node", "decode": "node", "admin": "admin"}
"""What `init` issues certificates for."""

_Folder = Annotated[Path, typer.Argument(help="Folder of the authority and the certificates.")]
_Name = Annotated[str, typer.Argument(help="Name of the service, and of its folder.")]
_Days = Annotated[int, typer.Option(min=1, max=_MAX_DAYS, help="Days until the certificates expire.")]

app = command_group("keys", _HELP)


@app.command("init")
def init(folder: _Folder, days: _Days = _DAYS) -> None:
    """Make an authority, and certificates of the services router, prefill, decode and admin; if interrupted, run it again."""
    try:
        present = [name for name in _SERVICES if (folder / name / CERTIFICATE).exists()]
    except OSError as error:  # a folder of another user
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    if len(present) == len(_SERVICES):
        raise ConfigError(f"{folder} holds these certificates already: `kvrelay keys issue` replaces one")
    authority = _open(folder, create=not present)
    strange = [str(folder / name) for name in present if not authority.issued(folder / name)]
    if strange:
        raise ConfigError(
            f"{authority.folder} has not issued the certificates in {' and '.join(strange)}: move them away"
        )
    for name in [name for name in _SERVICES if name not in present]:
        _issue(authority, folder / name, _SERVICES[name], days)
    print(f"keep {authority.folder} to yourself: everyone who has it can join the cluster")


@app.command("issue")
def issue(
    folder: _Folder,
    name: _Name,
    role: Annotated[str, typer.Option(help=f"What the service may be: {', '.join(ROLES)}.")],
    days: _Days = _DAYS,
) -> None:
    """Make a service's certificate, or renew it."""
    if role not in ROLES:
        raise ConfigError(f"--role must be one of {', '.join(ROLES)}, not {role!r}")
    if Path(name).name != name or name in ("", ".", "..", "ca"):
        raise ConfigError(f"{name!r} cannot be the name of a service's folder")
    _issue(_open(folder), folder / name, cast(ServiceRole, role), days)


@app.command("renew")
def renew(folder: _Folder) -> None:
    """Renew the authority for ten years, and update its certificate in every service's folder; its key stays."""
    authority = _open(folder)
    authority.renew()
    print(f"the authority is valid until {authority.ends:%Y-%m-%d}; issue certificates that ended with it again")
    _update(folder, authority, (CA, REVOKED), authority.copy_all)


@app.command("revoke")
def revoke(folder: _Folder, name: _Name) -> None:
    """Revoke all certificates of a service, and update the list of revoked ones in every service's folder."""
    authority = _open(folder)
    count = authority.revoke(name)
    print(
        f"revoked {counted(count, 'certificate')} of {name}"
        if count
        else f"all certificates of {name} were revoked before"
    )
    _update(folder, authority, (REVOKED,), authority.copy_revoked)


def _issue(authority: Authority, folder: Path, role: ServiceRole, days: int) -> None:
    """Raises: ConfigError."""
    ends_early = authority.issue(folder.name, role, folder, days)
    print(
        f"{folder} (ends with its authority on {authority.ends:%Y-%m-%d}: see `keys renew`)" if ends_early else folder
    )


def _update(folder: Path, authority: Authority, files: tuple[str, ...], copy: Callable[[Path], None]) -> None:
    """Copy what the authority has changed into every service's folder that can be written. Raises: ConfigError for others."""
    failed: list[str] = []
    for service in sorted(folder.iterdir()):
        if service == authority.folder:
            continue
        names = " and ".join(str(service / name) for name in files)
        try:
            if not (service / REVOKED).exists():
                continue
            copy(service)
        except OSError as error:
            failed.append(f"{names} ({error.strerror})")
        else:
            print(f"updated {names}; copy to the service's host")
    if failed:
        raise ConfigError(
            f"cannot write {', '.join(failed)}: run this again, or copy {' and '.join(files)} there from {authority.folder}"
        )


def _open(folder: Path, *, create: bool = False) -> Authority:
    """The authority of this folder; with `create` a new one if there is none.

    Raises: ConfigError if the package that makes certificates is missing, or the folder cannot be used.
    """
    try:
        from common.security.certificates import Authority
    except ImportError as error:
        raise ConfigError("certificates need the package `cryptography`: pip install 'kvrelay[tls]'") from error
    ca = folder / "ca"
    return Authority.create(ca) if create and not Authority.is_in(ca) else Authority(ca)
