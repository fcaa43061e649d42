"""`kvrelay up` without --tls refuses certificates that its services would use and it would not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.up_plan import planned

from common.base.errors import ConfigError
from kvrelay.up.certificates import refuse_given


def refuse(environ: dict[str, str]) -> None:
    """Raises: ConfigError where `kvrelay up` refuses."""
    refuse_given(planned(environ), environ)


def test_a_folder_of_certificates_for_single_services_is_refused(tmp_path: Path) -> None:
    """Exported for `kvrelay admin`, it let nodes sign records that the supervisor could not read: it never became ready."""
    for text in ("", "none"):
        refuse({"KVRELAY_TLS_DIR": text})
    with pytest.raises(ConfigError, match="KVRELAY_TLS_DIR is for services that are started one by one"):
        refuse({"KVRELAY_TLS_DIR": "keys/admin"})
    for table in ("router", "prefill", "decode"):
        file = tmp_path / "k.toml"
        file.write_text(f"[{table}]\ntls_dir = 'keys/{table}'\n")
        with pytest.raises(ConfigError, match="tls_dir in the configuration file is for services"):
            refuse({"KVRELAY_CONFIG": str(file)})
