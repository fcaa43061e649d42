"""`kvrelay admin`: exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.admin.cli import app


@pytest.mark.parametrize(
    ("arguments", "environ", "code"),
    [
        (["nodes"], {}, 3),
        (["nodes", "--url", "http://127.0.0.1:1"], {"KVRELAY_ADMIN_TOKEN": "t"}, 3),
        (["nodes", "--url", "http://127.0.0.1:1"], {}, 2),
        (["nodes", "--url", "http://127.0.0.1:1"], {"KVRELAY_ADMIN_TOKEN": "t", "KVRELAY_TLS_DIR": "nowhere"}, 78),
        (["nodes", "--colour"], {}, 2),
        (["node"], {}, 2),
        (["nowhere"], {}, 2),
        (["request", "\udcff"], {}, 2),
        (["route", "--prompt", "\udcff"], {}, 2),
        (["blocks", "--prompt", "x", "--cache-salt", "\udcff"], {}, 2),
        (["drain", "d", "--wait", "--timeout", "nan"], {}, 2),
        (["drain", "d", "--wait", "--timeout=-1"], {}, 2),
        (["scale", "decode=1", "decode=2"], {}, 2),
        (["roll", "--start-timeout", "nan"], {}, 2),
        (["drain", "d", "--wait", "--timeout", "0"], {}, 3),
        (["watch", "--interval", "inf"], {}, 2),
        (["support-bundle", "--output", "/nowhere/bundle.tar.gz"], {}, 74),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: list[str], environ: dict[str, str], code: int) -> None:
    result = CliRunner().invoke(app, arguments, env={"XDG_RUNTIME_DIR": str(tmp_path), **environ})
    assert result.exit_code == code, result.output
