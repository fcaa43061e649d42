"""Options whose value is a list, and bounds of others."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from common.config.fields import api_keys, listed
from common.config.service_configs import DecodeConfig, RouterConfig
from common.config.sources import resolve


@pytest.mark.parametrize("text", ["a,b/c", " a , b/c ", '["a", "b/c"]'])
def test_a_list_is_separated_by_commas_or_json(text: str) -> None:
    assert listed("x", text) == ["a", "b/c"]


def test_no_value_is_an_empty_list() -> None:
    assert listed("x", None) == listed("x", " ") == []


@pytest.mark.parametrize("text", [" ", ",", ", ,"])
def test_separators_without_an_api_key_are_refused(text: str) -> None:
    """Two variables that were not set, with a comma between them, let in every client."""
    assert api_keys("") == ()
    assert api_keys(" a, b,") == ("a", "b")
    with pytest.raises(ConfigError, match="api_key contains no key"):
        api_keys(text)


@pytest.mark.parametrize("text", ["a,,b", ",", "[1]", '["a"', '[""]'])
def test_an_empty_value_or_other_json_is_refused_with_the_configuration(text: str) -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        RouterConfig(served_model_name=text)


@pytest.mark.parametrize("name", ["lease_s", "max_num_seqs", "kv_memory_gb", "threads"])
def test_a_number_that_nothing_could_work_with_is_refused(name: str) -> None:
    """Redis, the node's record, the size in bytes and OpenMP once failed with it, each in words of its own."""
    with pytest.raises(ConfigError, match=f"{name} must be at most"):
        resolve(DecodeConfig, flags={name: str(10**21)}, environ={}, file=None)


@pytest.mark.parametrize("name", ["api_key", "cluster", "model", "node_id"])
def test_text_that_is_not_utf_8_is_refused_without_quoting_it(name: str) -> None:
    """The router and nodes ended with a traceback, some of them only after they had read the model."""
    cls = RouterConfig if name == "api_key" else DecodeConfig
    with pytest.raises(ConfigError, match=f"^{name} must be UTF-8$"):
        resolve(cls, flags={}, environ={f"KVRELAY_{name.upper()}": "caf\udce9"}, file=None)


@pytest.mark.parametrize("host", ["", " ", "[::1]", "127.0.0.1:80", "http://h", "u@h"])
@pytest.mark.parametrize("name", ["host", "admin_host", "advertise_host", "master_addr"])
def test_hosts_are_names_or_addresses(name: str, host: str) -> None:
    """A variable that was not set, as in `--host "$HOST"`, failed late, after a node had read its weights."""
    with pytest.raises(ConfigError, match=f"^{name} must be a host name or an address"):
        resolve(DecodeConfig, flags={name: host}, environ={}, file=None)
    assert resolve(DecodeConfig, flags={name: "fd00::7"}, environ={}, file=None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "0", "::0", "0:0:0:0:0:0:0:0"])
@pytest.mark.parametrize("name", ["advertise_host", "master_addr"])
def test_nobody_is_reached_at_every_interface(name: str, host: str) -> None:
    """It was refused when the node had read its model's config, or other ranks looked for the leader on their own host."""
    with pytest.raises(ConfigError, match=f"^{name} must be .* not the one for every interface, not '"):
        resolve(DecodeConfig, flags={name: host}, environ={}, file=None)
    for one in ("10.0.0.1", "fd00::", "::1", "0.example"):
        assert resolve(DecodeConfig, flags={name: one}, environ={}, file=None)


@pytest.mark.parametrize("cluster", ["", "}", "a{b"])
def test_cluster_names_fit_into_redis_keys(cluster: str) -> None:
    """Keys have the name in braces: with an empty one a Redis Cluster spreads them over its servers."""
    with pytest.raises(ConfigError, match="cluster must be a name without braces"):
        RouterConfig(cluster=cluster)
