"""`kvrelay keys` as an operator uses it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from common.security.tls import Credentials
from common.tools.keys.cli import app


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
    assert "revoked 1 certificates of decode-2" in keys("revoke", str(folder), "decode-2")
    assert (folder / "router" / "crl.pem").read_bytes() == (folder / "ca" / "crl.pem").read_bytes()


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
