"""The compose files without an engine: every option reaches its container, nothing is named twice or not at all."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import ROOT

from common.config.pooling_options import OF_PROCESS
from common.config.service_configs import DecodeConfig, PrefillConfig, RouterConfig

FOLDER = ROOT / "compose"
SERVICES = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
TLS = {"tls_dir"}
"""In compose.tls.yaml and compose.multi-host.tls.yaml."""
ONE_HOST_ONLY = {
    "compose.yaml": {"node_id", "advertise_host", "nnodes", "node_rank", "master_addr", "master_port"},
    "compose.multi-host.yaml": set[str](),
}
"""Options without sense on one host."""
OF_THE_FIRST = {
    *("task", "lora", "device", "tensor_parallel_size", "pipeline_parallel_size", "pp_layers"),
    *("prefill_context_parallel", "decode_context_parallel", "data_parallel_attention"),
}
"""Options of the first model only."""


def services(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))["services"]


def options(service: dict[str, Any]) -> set[str]:
    return {name.removeprefix("KVRELAY_").lower() for name in service["environment"] if name.startswith("KVRELAY_")}


@pytest.mark.parametrize("file", ONE_HOST_ONLY)
@pytest.mark.parametrize("service", SERVICES)
def test_every_option_reaches_its_container(file: str, service: str) -> None:
    given = options(services(file)[service])
    missing = {field.name for field in dataclasses.fields(SERVICES[service])} - given - TLS - ONE_HOST_ONLY[file]
    assert not missing


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_options_of_nodes_reach_those_of_a_second_model(role: str) -> None:
    given = options(services("compose.models.yaml")[f"{role}-second"])
    assert given == options(services("compose.yaml")[role]) - OF_THE_FIRST


def test_a_node_that_embeds_gets_options_that_it_uses() -> None:
    given = options(services("compose.models.yaml")["embed"])
    needless = {"data_port", "dtype"}
    assert given - needless == OF_PROCESS - TLS - ONE_HOST_ONLY["compose.yaml"] | {"model"}


def test_two_nodes_on_one_host_can_have_names() -> None:
    names = [
        services("compose.multi-host.yaml")[role]["environment"]["KVRELAY_NODE_ID"] for role in ("prefill", "decode")
    ]
    assert names == ["${PREFILL_NODE_ID:-}", "${DECODE_NODE_ID:-}"]


@pytest.mark.parametrize("file", ONE_HOST_ONLY)
@pytest.mark.parametrize("service", SERVICES)
def test_no_option_is_given_that_does_not_exist(file: str, service: str) -> None:
    known = {field.name for field in dataclasses.fields(SERVICES[service])} | {"admin_url"}
    assert not options(services(file)[service]) - known


@pytest.mark.parametrize(
    ("file", "base"), [("compose.tls.yaml", "compose.yaml"), ("compose.multi-host.tls.yaml", "compose.multi-host.yaml")]
)
def test_encryption_is_for_every_service_and_each_has_its_own_keys(file: str, base: str) -> None:
    encrypted = services(file)
    for name in SERVICES:
        assert name in services(base)
        assert encrypted[name]["environment"]["KVRELAY_TLS_DIR"] == f"/keys/{name}"
        [volume] = encrypted[name]["volumes"]
        assert volume.endswith(f"{name}:/keys/{name}:ro")


def test_encryption_is_for_the_nodes_of_further_models_as_well() -> None:
    encrypted = services("compose.models.tls.yaml")
    for name, node in services("compose.models.yaml").items():
        keys = f"keys-{node['command']}:/keys/{node['command']}:ro"
        assert keys in services("compose.tls.yaml")[node["command"]]["volumes"]
        assert encrypted[name]["volumes"] == [keys]
        assert encrypted[name]["environment"] == {"KVRELAY_TLS_DIR": f"/keys/{node['command']}"}
    assert len(encrypted) == len(services("compose.models.yaml"))


def variables(path: Path) -> set[str]:
    return set(re.findall(r"\$\{([A-Z][A-Z_]*)", path.read_text("utf-8")))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("compose.*yaml")), ids=lambda path: path.name)
def test_every_setting_is_in_the_example(path: Path) -> None:
    named = set(re.findall(r"^(?:# )?([A-Z][A-Z_]*)=", (FOLDER / ".env.example").read_text("utf-8"), re.M))
    assert not variables(path) - named
