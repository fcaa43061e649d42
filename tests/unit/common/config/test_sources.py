"""Where configuration values come from, which source wins, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, PrefillConfig, RouterConfig, UpConfig
from common.config.sources import resolve


def write(folder: Path, text: str) -> str:
    path = folder / "kvrelay.toml"
    path.write_text(text)
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "max_num_seqs = 2\n")
    environ = {"KVRELAY_MAX_NUM_SEQS": "4"}
    flags = {"max_num_seqs": "5"}
    given = [(flags, environ, file), ({}, environ, file), ({}, {}, file), ({}, {}, None)]
    found = [resolve(DecodeConfig, flags=f, environ=e, file=path).config.max_num_seqs for f, e, path in given]
    assert found == [5, 4, 2, 64]


def test_own_table_beats_top_level_and_other_tables_do_not_reach_a_service(tmp_path: Path) -> None:
    file = write(tmp_path, "max_num_seqs = 2\n[decode]\nmax_num_seqs = 3\n")
    assert resolve(DecodeConfig, flags={}, environ={}, file=file).config.max_num_seqs == 3
    assert resolve(PrefillConfig, flags={}, environ={}, file=file).config.max_num_seqs == 2


def test_sources_say_where_each_value_came_from(tmp_path: Path) -> None:
    file = write(tmp_path, 'cluster = "lab"\n[up]\nprefill = 2\n')
    resolved = resolve(UpConfig, flags={"decode": "3"}, environ={"KVRELAY_SEED": "1"}, file=file)
    assert {name: resolved.sources[name] for name in ("cluster", "prefill", "decode", "seed", "port")} == {
        "cluster": "file",
        "prefill": "table",
        "decode": "flag",
        "seed": "environment",
        "port": "default",
    }


def test_file_is_found_through_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "[router]\nport = 9\n")
    assert resolve(RouterConfig, flags={}, environ={"KVRELAY_CONFIG": file}, file=None).config.port == 9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_num_seq = 1", "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("[decoder]\nseed = 1", r"unknown table \[decoder\]; did you mean 'decode'?"),
        ("[router]\nprot = 1", r"unknown key 'prot' in \[router\]; did you mean 'port'?"),
        ("[router]\ndtype = 'auto'", r"unknown key 'dtype' in \[router\]"),
        ("port = 1", r"'port' is allowed only in a service's own table; put it into \[router\] or"),
        ("[decode]\nport = '1'", "'1' is not a whole number"),
        ("[decode]\nport = true", "True is not a whole number"),
        ("[decode]\nport = 1.0", "1.0 is not a whole number"),
        ("dtype = 'bfloat'", "not one of auto, float32, bfloat16, float16; did you mean 'bfloat16'?"),
        ("model = 3", "3 is not a text"),
        ("= 3", "not valid TOML"),
    ],
)
def test_mistake_in_a_file_names_the_place_and_the_near_one(tmp_path: Path, text: str, sentence: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")) as caught:
        resolve(DecodeConfig, flags={}, environ={}, file=file)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistake_in_the_table_of_another_service_is_reported_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prot"):
        resolve(DecodeConfig, flags={}, environ={}, file=write(tmp_path, "[router]\nprot = 1"))


def test_missing_file_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x\.toml"):
        resolve(DecodeConfig, flags={}, environ={}, file="/nowhere/x.toml")


def test_unknown_variable_with_our_prefix_is_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError, match="KVRELAY_MAX_NUM_SEQ; did you mean 'KVRELAY_MAX_NUM_SEQS'"):
        resolve(DecodeConfig, flags={}, environ={"KVRELAY_MAX_NUM_SEQ": "1"}, file=None)


def test_variables_that_kubernetes_sets_for_a_service_are_no_options_of_ours() -> None:
    """With a Service named `kvrelay` every pod gets them, and every start failed."""
    links = {
        "KVRELAY_SERVICE_HOST": "10.96.0.7",
        "KVRELAY_SERVICE_PORT": "8000",
        "KVRELAY_SERVICE_PORT_HTTP": "8000",
        "KVRELAY_PORT": "tcp://10.96.0.7:8000",
        "KVRELAY_PORT_8000_TCP": "tcp://10.96.0.7:8000",
        "KVRELAY_PORT_8000_TCP_PROTO": "tcp",
        "KVRELAY_PORT_8000_TCP_PORT": "8000",
        "KVRELAY_PORT_8000_TCP_ADDR": "10.96.0.7",
        "KVRELAY_REDIS_SERVICE_HOST": "10.96.0.8",
        "KVRELAY_REDIS_PORT_6379_TCP_ADDR": "10.96.0.8",
        "KVRELAY_ADMIN_PORT": "tcp://10.96.0.9:8001",
        "KVRELAY_MAX_WAITING_PORT": "udp://[fd00::9]:53",
    }
    for service in (RouterConfig, DecodeConfig, PrefillConfig, UpConfig):
        resolved = resolve(service, flags={}, environ={**links, "KVRELAY_SEED": "3"}, file=None)
        assert resolved.ignored == tuple(sorted(links))
        assert resolved.config.port == service().port
    ports = {"KVRELAY_PORT": "9000", "KVRELAY_ADMIN_PORT": "9001"}
    config = resolve(RouterConfig, flags={}, environ=ports, file=None).config
    assert (config.port, config.admin_port) == (9000, 9001)
    for name, value in [("KVRELAY_PORT", "http://h:1"), ("KVRELAY_SERVICE_HOSTS", "h"), ("KVRELAY_PRT", "9000")]:
        with pytest.raises(ConfigError, match=name):
            resolve(RouterConfig, flags={}, environ={name: value}, file=None)


def test_a_flag_wins_over_a_malformed_variable() -> None:
    environ = {"KVRELAY_PORT": "http://h:1", "KVRELAY_POLICY": "kv_aware"}
    assert resolve(RouterConfig, flags={"port": "9000"}, environ=environ, file=None).config.port == 9000


def test_variable_of_another_service_is_ignored() -> None:
    resolve(DecodeConfig, flags={}, environ={"KVRELAY_MAX_WAITING": "not even a number"}, file=None)


def test_empty_variable_counts_as_unset() -> None:
    environ = {"KVRELAY_PORT": "", "KVRELAY_MODEL": ""}
    config = resolve(DecodeConfig, flags={}, environ=environ, file=None).config
    assert (config.port, config.model) == (0, "demo")


def test_none_unsets_an_optional_value(tmp_path: Path) -> None:
    file = write(tmp_path, "kv_blocks = 10\n")
    assert resolve(DecodeConfig, flags={"kv_blocks": "none"}, environ={}, file=file).config.kv_blocks is None


def test_whole_number_in_a_file_serves_as_a_float(tmp_path: Path) -> None:
    value = resolve(DecodeConfig, flags={}, environ={}, file=write(tmp_path, "lease_s = 2\n")).config.lease_s
    assert (value, type(value)) == (2.0, float)
