"""Who may speak to whom over mutual TLS, and what changes without a restart."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import ssl
from pathlib import Path

import pytest
from support.certificates import made

from common.base.errors import ConfigError
from common.security.certificates import Authority
from common.security.names import host_of
from common.security.tls import Credentials, shows_role


async def greet(server: Credentials, client: ssl.SSLContext | None, role: str = "node") -> bool:
    """Whether a client with these certificates gets an answer, and its bytes reach the server."""
    heard: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        heard.append(shows_role(writer.get_extra_info("ssl_object"), ["router"]))
        writer.write(b"hello")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server.for_server())
    port = listening.sockets[0].getsockname()[1]
    try:
        name = None if client is None else host_of(role)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
        writer.write(b"hello")
        answer = await reader.read(5)
        writer.close()
    except OSError:  # ssl.SSLError is one
        answer = b""
    listening.close()
    assert bool(heard) == (answer == b"hello")
    return heard == [True]


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_a_router_and_a_node_of_one_authority_trust_each_other() -> None:
    assert asyncio.run(greet(Credentials(str(made() / "node")), Credentials(str(made() / "router")).for_client()))


@pytest.mark.parametrize("name", ["stranger", "expired"])
def test_a_client_with_another_certificate_is_refused(name: str) -> None:
    assert not asyncio.run(greet(Credentials(str(made() / "node")), Credentials(str(made() / name)).for_client()))


def test_a_client_without_certificate_or_without_tls_is_refused() -> None:
    for client in (anonymous(), None):
        assert not asyncio.run(greet(Credentials(str(made() / "node")), client))


@pytest.mark.parametrize("name", ["stranger", "expired", "router"])
def test_a_server_with_another_certificate_is_refused(name: str) -> None:
    assert not asyncio.run(greet(Credentials(str(made() / name)), Credentials(str(made() / "router")).for_client()))


def test_certificates_are_revoked_and_renewed_without_a_restart(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    for role in ("router", "node"):
        authority.issue(role, role, tmp_path / role, 1)  # type: ignore[arg-type]
    router, node = Credentials(str(tmp_path / "router")), Credentials(str(tmp_path / "node"))
    assert asyncio.run(greet(node, router.for_client()))
    assert authority.revoke("router") == 1
    authority.copy_revoked(tmp_path / "node")
    assert not asyncio.run(greet(node, router.for_client()))
    authority.issue("router", "router", tmp_path / "router", 1)
    assert asyncio.run(greet(node, router.for_client()))
    assert authority.revoke("node") == 1
    authority.copy_revoked(tmp_path / "router")
    assert not asyncio.run(greet(node, router.for_client()))


def test_services_of_two_authorities_trust_each_other_with_both_in_their_files(tmp_path: Path) -> None:
    """While one replaces the other. Both have one name, and OpenSSL took the list of revoked certificates of the wrong one."""
    old, new = Authority.create(tmp_path / "old"), Authority.create(tmp_path / "new")
    old.issue("router", "router", tmp_path / "router", 1)
    new.issue("node", "node", tmp_path / "node", 1)

    def copy() -> None:
        for role, file in itertools.product(("router", "node"), ("ca.pem", "crl.pem")):
            both = [(tmp_path / name / file).read_bytes() for name in ("old", "new")]
            (tmp_path / role / file).write_bytes(b"".join(both))

    copy()
    router, node = Credentials(str(tmp_path / "router")), Credentials(str(tmp_path / "node"))
    assert asyncio.run(greet(node, router.for_client()))
    old.revoke("router")
    copy()
    assert not asyncio.run(greet(node, router.for_client()))


def test_what_one_of_two_authorities_renews_leaves_the_other_in_a_service_s_files(tmp_path: Path) -> None:
    """A revocation while one replaces the other took its list away, without which all of its certificates were refused."""
    old, new = Authority.create(tmp_path / "old"), Authority.create(tmp_path / "new")
    old.issue("router", "router", tmp_path / "router", 1)
    new.issue("node", "node", tmp_path / "node", 1)
    for role, file in itertools.product(("router", "node"), ("ca.pem", "crl.pem")):
        both = [(tmp_path / name / file).read_bytes() for name in ("old", "new")]
        (tmp_path / role / file).write_bytes(b"broken\n".join(both))
    router, node = Credentials(str(tmp_path / "router")), Credentials(str(tmp_path / "node"))
    new.issue("other", "node", tmp_path / "other", 1)
    new.revoke("other")
    old.renew()
    for role in ("router", "node"):
        old.copy_all(tmp_path / role)
        new.copy_revoked(tmp_path / role)
        assert (tmp_path / role / "ca.pem").read_text().count("BEGIN") == 2
        assert (tmp_path / role / "crl.pem").read_text().count("BEGIN") == 2
    assert asyncio.run(greet(node, router.for_client()))
    old.revoke("router")
    old.copy_revoked(tmp_path / "node")
    assert not asyncio.run(greet(node, router.for_client()))


def test_line_ends_of_windows_in_a_service_s_files_stay_with_their_certificates(tmp_path: Path) -> None:
    """The certificates of two other authorities ended up on one line, and neither could be parsed."""
    authorities = [Authority.create(tmp_path / name) for name in "abc"]
    authorities[0].issue("router", "router", tmp_path / "router", 1)
    for file in ("ca.pem", "crl.pem"):
        parts = [(each.folder / file).read_bytes() for each in authorities]
        (tmp_path / "router" / file).write_bytes(b"".join(parts).replace(b"\n", b"\r\n"))
    authorities[0].copy_all(tmp_path / "router")
    Credentials(str(tmp_path / "router"))


def test_what_a_renewed_authority_has_issued_is_valid_with_its_old_and_its_new_certificate(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    authority.issue("router", "router", tmp_path / "router", 1)
    authority.issue("node", "node", tmp_path / "node", 1)
    authority.renew()
    authority.issue("node", "node", tmp_path / "node", 1)  # with the new ca.pem; the router has the old one
    router, node = Credentials(str(tmp_path / "router")), Credentials(str(tmp_path / "node"))
    assert (tmp_path / "router" / "ca.pem").read_bytes() != (tmp_path / "node" / "ca.pem").read_bytes()
    assert asyncio.run(greet(node, router.for_client()))


def test_half_written_files_leave_the_old_certificate_in_use(tmp_path: Path) -> None:
    folder = shutil.copytree(made() / "node", tmp_path / "node")
    node = Credentials(str(folder))
    (folder / "cert.pem").write_text("half")
    assert asyncio.run(greet(node, Credentials(str(made() / "router")).for_client()))


@pytest.mark.parametrize("file", ["ca.pem", "cert.pem", "key.pem", "crl.pem"])
def test_a_missing_or_broken_file_is_refused_in_one_sentence(tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(made() / "node", tmp_path / "node")
    (folder / file).write_text("not PEM")
    with pytest.raises(ConfigError, match="cannot be used"):
        Credentials(str(folder))
    (folder / file).unlink()
    with pytest.raises(ConfigError, match=rf"{file}\)") as caught:
        Credentials(str(folder))
    assert "\n" not in caught.value.message


def test_only_holders_of_the_key_derive_its_secret() -> None:
    node, router = (Credentials(str(made() / name)) for name in ("node", "router"))
    assert node.secret(b"a") == Credentials(str(made() / "node")).secret(b"a")
    assert len({node.secret(b"a"), node.secret(b"b"), router.secret(b"a")}) == 3
