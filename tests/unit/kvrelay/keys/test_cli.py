"""`kvrelay keys` as an operator uses it."""

from __future__ import annotations

import datetime
import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cryptography import x509
from typer.testing import CliRunner

from common.security.tls import Credentials
from kvrelay.keys.cli import app


def keys(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.output


def test_init_issue_and_revoke(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert str(folder / "ca") in keys("init", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["admin", "ca", "decode", "prefill", "router"]
    for file in folder.rglob("*.pem"):
        assert file.stat().st_mode & 0o077 == 0, file
    keys("issue", str(folder), "decode-2", "--role", "node")
    for name in ("router", "prefill", "decode", "decode-2", "admin"):
        Credentials(str(folder / name))
    assert "revoked 1 certificate of decode-2" in keys("revoke", str(folder), "decode-2")
    assert (folder / "router" / "crl.pem").read_bytes() == (folder / "ca" / "crl.pem").read_bytes()


def test_an_interrupted_init_can_be_run_again(tmp_path: Path) -> None:
    """Also one whose disk was full, whatever was written last. Compose runs it again while the last certificate is missing."""
    keys("init", str(tmp_path / "whole"))
    written = sorted((tmp_path / "whole").rglob("*.pem"), key=lambda file: file.stat().st_mtime_ns)
    assert written[-1] == tmp_path / "whole" / "admin" / "cert.pem"
    for last in range(len(written)):
        folder = tmp_path / str(last)
        (folder / "ca" / "issued").mkdir(parents=True)
        for file in written[:last]:
            copy = folder / file.relative_to(tmp_path / "whole")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
        keys("init", str(folder))
        for name in ("router", "prefill", "decode", "admin"):
            Credentials(str(folder / name))
    keys("init", str(tmp_path / "whole"), code=78)


def test_what_cannot_be_done_is_said_in_one_sentence(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert "36500" in keys("init", folder, "--days", "9999999", code=2)
    assert "holds no certificate authority" in keys("issue", folder, "a", "--role", "node", code=78)
    keys("init", folder)
    assert "already" in keys("init", folder, code=78)
    assert "--role must be one of" in keys("issue", folder, "a", "--role", "king", code=78)
    for name in ("ca", "../x", "."):
        assert "cannot be the name" in keys("issue", folder, name, "--role", "node", code=78)
    assert "no certificate for 'a'" in keys("revoke", folder, "a", code=78)


def test_a_revocation_that_did_not_reach_every_folder_is_said_and_can_be_run_again(tmp_path: Path) -> None:
    """It once ended at the first folder that could not be written, and refused to be run again."""
    keys("init", str(tmp_path))
    obstacle = tmp_path / "prefill" / f".crl.pem.{os.getpid()}"
    obstacle.mkdir()
    assert f"cannot write {tmp_path / 'prefill' / 'crl.pem'}" in keys("revoke", str(tmp_path), "decode", code=78)
    wanted = (tmp_path / "ca" / "crl.pem").read_bytes()
    assert (tmp_path / "router" / "crl.pem").read_bytes() == wanted
    obstacle.rmdir()
    assert "all certificates of decode were revoked before" in keys("revoke", str(tmp_path), "decode")
    assert (tmp_path / "prefill" / "crl.pem").read_bytes() == wanted


def test_a_folder_of_another_user_is_named_not_passed_over(tmp_path: Path) -> None:
    """A revocation that did not reach it ended with success; `init` ended with a traceback."""
    keys("init", str(tmp_path))
    exists = Path.exists

    def exists_unless_closed(path: Path, **options: Any) -> bool:
        if path.parent == tmp_path / "prefill":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path, **options)

    with patch.object(Path, "exists", exists_unless_closed):
        said = keys("revoke", str(tmp_path), "decode", code=78)
        assert f"cannot write {tmp_path / 'prefill' / 'crl.pem'} (Permission denied)" in said
        assert f"cannot read {tmp_path / 'prefill' / 'cert.pem'}: Perm" in keys("init", str(tmp_path), code=78)
    wanted = (tmp_path / "ca" / "crl.pem").read_bytes()
    assert (tmp_path / "router" / "crl.pem").read_bytes() == wanted
    assert (tmp_path / "prefill" / "crl.pem").read_bytes() != wanted


def test_a_damaged_file_of_the_authority_is_named(tmp_path: Path) -> None:
    keys("init", str(tmp_path))
    issued = next((tmp_path / "ca" / "issued").iterdir())
    issued.write_bytes(b"")
    assert f"{issued} cannot be read" in keys("revoke", str(tmp_path), "decode", code=78)
    (tmp_path / "ca" / "crl.pem").unlink()
    assert "crl.pem cannot be read" in keys("revoke", str(tmp_path), "decode", code=78)


def test_certificates_end_with_their_authority_which_can_be_renewed(tmp_path: Path) -> None:
    """`--days` beyond it promised years in which no service would have let another one in."""
    folder = str(tmp_path)
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3650)
    early = f"(ends with its authority on {ends:%Y-%m-%d}"
    assert keys("init", folder, "--days", "36500").count(early) == 4
    assert early in keys("issue", folder, "a", "--role", "node", "--days", "3652")
    assert early not in keys("issue", folder, "a", "--role", "node", "--days", "3650")
    assert x509.load_pem_x509_certificate((tmp_path / "a" / "cert.pem").read_bytes()).not_valid_after_utc <= ends
    in_ten_years = ends + datetime.timedelta(days=1)
    with patch("common.security.certificates._now", lambda: in_ten_years):
        assert "`kvrelay keys renew` it" in keys("issue", folder, "a", "--role", "node", code=78)
        said = keys("renew", folder)
        assert f"valid until {in_ten_years + datetime.timedelta(days=3650):%Y-%m-%d}" in said
        keys("issue", folder, "a", "--role", "node", "--days", "3650")
    for file in ("ca.pem", "crl.pem"):
        assert str(tmp_path / "router" / file) in said.replace("\n", "")
        assert (tmp_path / "router" / file).read_bytes() == (tmp_path / "ca" / file).read_bytes()


def test_init_adds_nothing_to_certificates_of_another_authority(tmp_path: Path) -> None:
    """Without the old authority it made a new one, and half of the services refused the other half."""
    keys("init", str(tmp_path))
    shutil.rmtree(tmp_path / "prefill")
    (tmp_path / "ca").rename(tmp_path / "kept")
    assert "holds no certificate authority" in keys("init", str(tmp_path), code=78)
    keys("init", str(tmp_path / "other"))
    (tmp_path / "other" / "ca").rename(tmp_path / "ca")
    said = " ".join(keys("init", str(tmp_path), code=78).split())
    assert f"the certificates in {tmp_path / 'router'} and {tmp_path / 'decode'} and {tmp_path / 'admin'}: move" in said
    assert not (tmp_path / "prefill").exists()
    shutil.rmtree(tmp_path / "ca")
    (tmp_path / "kept").rename(tmp_path / "ca")
    keys("renew", str(tmp_path))
    keys("init", str(tmp_path))
    Credentials(str(tmp_path / "prefill"))
