"""Signatures by a service's own key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.certificates import made

from common.base.errors import ConfigError, ProtocolError
from common.security.certificates import Authority
from common.security.signatures import Signer


def signer(name: str) -> Signer:
    return Signer(made() / name)


def test_what_a_node_signed_is_believed_by_all_of_its_authority() -> None:
    for reader in ("router", "node", "admin"):
        signer(reader).check(b"content", *signer("node").sign(b"content"), "node")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stranger", "another authority"),
        ("expired", "expired"),
        ("early", "not valid yet"),
        ("router", "not of a node"),
        ("admin", "not of a node"),
    ],
)
def test_what_others_signed_is_not_believed(name: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        signer("router").check(b"content", *signer(name).sign(b"content"), "node")


def test_changed_content_signature_or_certificate_is_not_believed() -> None:
    certificate, signature = signer("node").sign(b"content")
    for content, shown, signed in (
        (b"other", certificate, signature),
        (b"content", certificate, signature[:-1] + bytes([signature[-1] ^ 1])),
        (b"content", certificate, b""),
        (b"content", b"", signature),
        (b"content", b"\xff" * 100, signature),
    ):
        with pytest.raises(ProtocolError, match="signature"):
            signer("router").check(content, shown, signed, "node")


def test_a_revoked_nodes_signature_is_not_believed_and_a_renewed_one_signs_again(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    for name in ("node", "router"):
        authority.issue(name, "node" if name == "node" else "router", tmp_path / name, 1)
    node, router = Signer(tmp_path / "node"), Signer(tmp_path / "router")
    old = node.sign(b"content")
    router.check(b"content", *old, "node")
    authority.revoke("node")
    authority.copy_revoked(tmp_path / "router")
    with pytest.raises(ProtocolError, match="revoked"):
        router.check(b"content", *old, "node")
    assert not node.is_renewed
    authority.issue("node", "node", tmp_path / "node", 1)
    assert node.is_renewed
    router.check(b"content", *node.sign(b"content"), "node")


def test_services_of_two_authorities_believe_each_other_with_both_in_their_files(tmp_path: Path) -> None:
    """Only the first in `ca.pem` and `crl.pem` counted, where TLS takes all."""
    for name in ("one", "two"):
        Authority.create(tmp_path / name).issue(name, "node", tmp_path / f"node-{name}", 1)
    Authority(tmp_path / "two").revoke("two")
    Authority(tmp_path / "two").issue("three", "node", tmp_path / "node-three", 1)
    both = tmp_path / "router"
    both.mkdir()
    for file in ("ca.pem", "crl.pem"):
        (both / file).write_bytes((tmp_path / "one" / file).read_bytes() + (tmp_path / "two" / file).read_bytes())
    for name in ("one", "three"):
        Signer(both).check(b"content", *Signer(tmp_path / f"node-{name}").sign(b"content"), "node")
    with pytest.raises(ProtocolError, match="revoked"):
        Signer(both).check(b"content", *Signer(tmp_path / "node-two").sign(b"content"), "node")
    with pytest.raises(ProtocolError, match="another authority"):
        Signer(both).check(b"content", *signer("node").sign(b"content"), "node")


@pytest.mark.parametrize("first", ["cert.pem", "key.pem"])
def test_a_folder_that_is_being_copied_signs_nothing_until_it_is_whole(tmp_path: Path, first: str) -> None:
    """A renewal of the lease that fell between the two files once signed with the old key and the new certificate, for ever."""
    authority = Authority.create(tmp_path / "ca")
    live, new = tmp_path / "live", tmp_path / "new"
    for folder in (live, new):
        authority.issue("node", "node", folder, 1)
    node = Signer(live)
    node.sign(b"content")
    shutil.copy(new / first, live)
    assert node.is_renewed
    with pytest.raises(ConfigError, match="not the key of"):
        node.sign(b"content")
    shutil.copy(new / ("key.pem" if first == "cert.pem" else "cert.pem"), live)
    assert node.is_renewed
    node.check(b"content", *node.sign(b"content"), "node")
    assert not node.is_renewed


def test_a_folder_without_a_key_is_reported_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Signer(tmp_path).sign(b"content")
