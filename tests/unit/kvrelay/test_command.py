"""The command line as a user sees it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.paths import ROOT
from typer.testing import CliRunner

from common.config.cli import _with_lists, service_app
from common.config.fields import field_infos
from common.config.service_configs import SERVICES, UpConfig
from common.config.sources import Resolved


def kvrelay(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "200", **(env or {})}
    command = [sys.executable, "-m", "kvrelay", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_service_and_each_services_help_every_option() -> None:
    overview = kvrelay("--help").stdout
    for service in SERVICES:
        assert f" {service.section} " in overview
    text = kvrelay("decode", "--help").stdout
    for name in field_infos(SERVICES[2]):
        assert f"--{name.replace('_', '-')} " in text
        assert f"KVRELAY_{name.upper()}" in text


def test_help_shows_square_brackets() -> None:
    text = " ".join(kvrelay("decode", "--help").stdout.split())
    assert "the library transformers (the extra kvrelay[models]); auto" in text


def test_help_loads_neither_torch_nor_a_web_framework() -> None:
    # An import hook would see attempts of this process only; -X importtime sees what really was loaded.
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvrelay", "prefill", "--help"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {line.rsplit("|", 1)[-1].strip() for line in process.stderr.splitlines()}
    assert "common.config.service_configs" in loaded
    assert not loaded & {"torch", "fastapi", "transformers", "zmq", "numpy", "kvrelay.offline"}


def test_ctrl_c_while_the_command_line_is_imported_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    process = subprocess.run(
        [sys.executable, "-P", "-c", "from kvrelay.__main__ import main; main()"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == -signal.SIGINT
    assert process.stderr == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_opened_before_a_socket_takes_their_place(closed: str) -> None:
    code = """if True:
        import os, sys
        from kvrelay.command import main
        sys.argv = ["kvrelay", "--version"]
        try:
            os._exit = lambda code: sys.exit(code)
            main()
        finally:
            print("", file=sys.stderr, flush=True)
            assert all(os.get_inheritable(descriptor) for descriptor in range(3))
            assert os.open("/", os.O_RDONLY) > 2 and sys.stdin.read() == ""
    """
    command = ["bash", "-c", f'"$@" {closed}', "bash", sys.executable, "-c", code]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert process.returncode == 0


def test_a_deleted_working_folder_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = ["bash", "-c", 'rmdir "$PWD"; "$@"', "bash", sys.executable, "-m", "kvrelay", "router"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 78
    assert (
        process.stderr == "kvrelay: cannot use the working folder: No such file or directory; change to another one\n"
    )


@pytest.mark.parametrize(
    ("args", "env", "sentence"),
    [
        (["router", "--port", "many"], {}, "--port: 'many' is not a whole number"),
        (["router"], {"KVRELAY_PROT": "1"}, "unknown environment variable KVRELAY_PROT; did you mean 'KVRELAY_PORT'?"),
        (["decode", "--config", "/nowhere.toml"], {}, "cannot read the configuration file /nowhere.toml"),
        (
            ["prefill", "--redis-url", "redis://:secret@127.0.0.1:1/0"],
            {},
            "cannot reach Redis at redis://***@127.0.0.1:1/0",
        ),
        (["router", "--redis-url", "http://127.0.0.1"], {}, "is malformed"),
        (
            ["router", "--redis-url", "redis://:secret@127.0.0.1:1/0?ssl_ca_certs=/ca.pem"],  # an option of rediss://
            {},
            "is malformed: no such option here: 'ssl_ca_certs'",
        ),
        (["router", "--redis-url", "redis+cluster://127.0.0.1:1?foo=1"], {}, "no such option here: 'foo'"),
        (["up", "--redis-url", "redis://127.0.0.1:1/0", "--port", "0"], {}, "cannot reach Redis"),
        (["up", "--pid-file", "/nowhere/pids.json", "--port", "0"], {}, "/nowhere is not a writable folder"),
        (["up", "--pid-file", "/tmp", "--port", "0"], {}, "cannot write the pid file /tmp: it is a folder"),
        (["up", "--host", "a..b", "--port", "0"], {}, "cannot listen on a..b:0"),
    ],
)
def test_configuration_mistake_is_one_sentence_and_exit_code_78(
    args: list[str], env: dict[str, str], sentence: str
) -> None:
    result = kvrelay(*args, env=env)
    assert result.returncode == 78, result.stderr
    assert result.stderr.startswith("kvrelay: ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert "secret" not in result.stderr


@pytest.mark.parametrize("command", ["router", "decode", "up"])
def test_the_reason_of_an_end_is_a_line_of_a_json_log(command: str) -> None:
    result = kvrelay(command, "--redis-url", "redis://127.0.0.1:1", "--port", "0", "--log-format", "json")
    assert result.returncode == 78
    line = json.loads(result.stderr)
    assert (line["level"], line["message"]) == (
        "error",
        "cannot reach Redis at redis://127.0.0.1:1: Connection refused",
    )


def test_flags_of_other_servers_and_underscores_are_accepted() -> None:
    args = [
        "decode",
        "--model-path",
        "x",
        "--context-length=5",
        "--max_num_seqs",
        "2",
        "--redis_url",
        "redis://127.0.0.1:1",
    ]
    assert "cannot reach Redis" in kvrelay(*args).stderr
    assert "--max-model-len: 'five' is not" in kvrelay("decode", "--context-length", "five").stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--enforce-eager", "--no-async-scheduling"], "cannot reach Redis"),
        (["--enforce_eager", "false", "--async-scheduling=true"], "cannot reach Redis"),
        (["--async-scheduling", "none"], "cannot reach Redis"),
        (["--async-scheduling", "None", "--enforce-eager"], "cannot reach Redis"),
        (["--enforce-eager=perhaps"], "--enforce-eager: 'perhaps' is neither true nor false"),
        (["--no-such-switch"], "No such option"),
    ],
)
def test_switches_need_no_value(args: list[str], sentence: str) -> None:
    assert sentence in kvrelay("decode", "--redis-url", "redis://127.0.0.1:1", *args).stderr


def test_unknown_option_is_wrong_usage_and_suggests_the_near_one() -> None:
    result = kvrelay("decode", "--prot", "3")
    assert result.returncode == 2
    assert "--port" in result.stderr


def test_declared_subcommands_exist() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kvrelay.commands"]
    assert set(declared) >= {service.section for service in SERVICES}
    for name, value in declared.items():
        assert EntryPoint(name, value, "kvrelay.commands").load() is not None


@pytest.mark.parametrize(
    "args",
    [
        ["--names", "a", "b", "--port", "1"],
        ["--names=a", "--port", "1", "--names", "b"],
        ["--port", "1", "--names", "a,b"],
    ],
)
def test_a_list_may_be_several_words_or_several_flags(args: list[str]) -> None:
    assert _with_lists(args, {"--names"}) == ["--port", "1", "--names=a,b"]


def test_serve_takes_the_model_without_a_flag_and_refuses_unknown_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Resolved[UpConfig]] = []
    app = service_app(UpConfig, help="", run=seen.append, name="serve", argument="model")
    for name in [name for name in os.environ if name.startswith("KVRELAY_")]:
        monkeypatch.delenv(name)
    args = ["./my-model", "--port", "9000", "--max-model-len", "64", "--context-length=32", "--no-enforce-eager"]
    assert CliRunner().invoke(app, args).exit_code == 0
    [resolved] = seen
    config = resolved.config
    assert (config.model, config.port, config.max_model_len, config.enforce_eager) == ("./my-model", 9000, 32, False)
    assert resolved.sources["model"] == "flag"
    for wrong in (["--model", "x"], ["x", "--enable-magic"], ["x", "y"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
    assert CliRunner().invoke(app, [], env={"KVRELAY_MODEL": "from-env"}).exit_code == 0
    assert seen[-1].config.model == "from-env"
