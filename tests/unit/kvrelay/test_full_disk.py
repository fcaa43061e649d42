"""A disk without room: every command that writes says so in one sentence, and what was there before stays."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from common.base.errors import ConfigError, KvRelayError, Unavailable
from common.cluster.running_clusters import RunningCluster, announced, runtime_folder
from common.node.profile import node_profile
from common.security.certificates import Authority
from kvrelay.admin import bundle, options
from kvrelay.admin.cli import app as admin
from kvrelay.api_client import ApiAnswer
from kvrelay.batch.output_file import OutputFile
from kvrelay.load.results import write
from kvrelay.up.pid_file import PidEntry, PidFile
from kvrelay.up.run_folder import run_folder


@contextlib.contextmanager
def full_disk(room: int = 0) -> Generator[None]:
    """No file of this process may have more than `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def batch_output(folder: Path) -> None:
    with OutputFile(folder / "out.jsonl") as output, full_disk():
        output.add("a", ApiAnswer(200, "r", {}))


def certificate(folder: Path) -> None:
    authority = Authority.create(folder / "ca")
    authority.issue("node", "node", folder / "node", 1)
    before = (folder / "node" / "cert.pem").read_bytes()
    try:
        with full_disk():
            authority.issue("node", "node", folder / "node", 1)
    finally:
        assert (folder / "node" / "cert.pem").read_bytes() == before


def load_result(folder: Path) -> None:
    write(folder / "load.json", '{"a": 1}')
    try:
        with full_disk():
            write(folder / "load.json", '{"a": 2}')
    finally:
        assert '"a": 1' in (folder / "load.json").read_text()


def load_report(folder: Path) -> None:
    try:
        with full_disk():
            write(folder / "load.html", "<html>")
    finally:
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("write", [batch_output, certificate, load_result, load_report])
def test_what_cannot_be_written_is_one_sentence(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(KvRelayError, match=r"cannot write .*File too large") as caught:
        write(tmp_path)
    assert "\n" not in caught.value.message


def test_a_support_bundle_is_reported_as_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "collect", lambda url: {"status": {"text": os.urandom(5000).hex()}})
    with full_disk():
        result = CliRunner().invoke(admin, ["support-bundle", "--output", str(tmp_path / "bundle.tar.gz")])
    assert result.exit_code == 74
    assert result.stderr.count("\n") == 1
    assert "cannot write" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_profile_is_reported_as_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = SimpleNamespace(url="", get=lambda *_, **__: {}, post=lambda *_, **__: os.urandom(5000))
    monkeypatch.setattr(options, "connect", lambda *_: router)
    with full_disk():
        result = CliRunner().invoke(admin, ["profile", "router", "--output", str(tmp_path / "profile.json.gz")])
    assert result.exit_code == 74
    assert result.stderr.count("\n") == 1
    assert "cannot write" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [0, 1000])
def test_a_node_without_room_for_its_trace_says_so(room: int) -> None:
    with full_disk(room), pytest.raises(Unavailable, match=r"could not be written completely to /.*is its disk full"):
        node_profile(0.1)


def test_the_pid_file_from_before_stays_and_its_writer_is_told(tmp_path: Path) -> None:
    """`kvrelay up` says it in a line and goes on."""
    file = PidFile(str(tmp_path / "pids.json"))
    file.write([PidEntry("router-0", "router", 1, "")])
    with full_disk(), pytest.raises(OSError, match="too large"):
        file.write([PidEntry("router-0", "router", 2, "")])
    assert '"pid": 1' in (tmp_path / "pids.json").read_text()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cluster_that_cannot_be_announced_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entered = False
    with (
        caplog.at_level(logging.WARNING),
        full_disk(),
        announced(RunningCluster(os.getpid(), {}, "t"), tmp_path / "run"),
    ):
        entered = True
    assert entered
    assert "cannot find this cluster by itself" in caplog.text


def test_a_new_authority_is_refused(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(ConfigError, match="cannot write"):
        Authority.create(tmp_path / "ca")


def test_a_cluster_is_found_and_its_folder_made_where_no_temporary_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's `tempfile` writes a file to find its folder: `kvrelay up`, `admin` and `load` ended with its traceback."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with full_disk():
        assert runtime_folder({}).name == f"kvrelay-{os.getuid()}"
        with run_folder() as folder, pytest.raises(ConfigError, match=f"cannot write {folder / 'ca'}: File too large"):
            Authority.create(folder / "ca")
