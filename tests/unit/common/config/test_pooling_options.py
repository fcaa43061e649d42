"""Options that a node of a pooling model has no use for are refused by name, or logged where they are for all nodes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.config.pooling_options import USED, check_options
from common.config.service_configs import PrefillConfig
from common.config.sources import resolve


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", "2"),
        ("kv_blocks", "100"),
        ("kv_memory_gb", "2"),
        ("kv_cache_dtype", "fp8"),
        ("lora", "a=b"),
        ("device", "cuda"),
        ("model_impl", "transformers"),
        ("kv_transport", "zmq"),
        ("nnodes", "2"),
    ],
)
@pytest.mark.parametrize("is_encoder", [True, False])
def test_an_option_without_effect_is_refused_by_name(name: str, value: str, is_encoder: bool) -> None:
    resolved = resolve(PrefillConfig, flags={name: value}, environ={}, file=None)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect"):
        check_options(resolved, is_encoder=is_encoder)


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("quantization", "int8"), ("load_format", "dummy")])
def test_decoders_take_options_of_weights_that_encoders_do_not(name: str, value: str) -> None:
    resolved = resolve(PrefillConfig, flags={name: value}, environ={}, file=None)
    check_options(resolved, is_encoder=False)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect"):
        check_options(resolved, is_encoder=True)


def test_options_that_say_what_a_node_does_anyway_are_taken() -> None:
    flags = {"device": "cpu", "dtype": "float32", "tensor_parallel_size": "1", "max_model_len": "64"}
    check_options(resolve(PrefillConfig, flags=flags, environ={}, file=None), is_encoder=True)


def test_what_is_said_for_all_nodes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text("kv_blocks = 100\n")
    environ = {"KVRELAY_DTYPE": "bfloat16"}
    with caplog.at_level(logging.INFO):
        check_options(resolve(PrefillConfig, flags={}, environ=environ, file=str(file)), is_encoder=True)
    assert "these options have no effect on a node of a pooling model: --dtype, --kv-blocks" in caplog.text


def test_the_options_in_use_exist() -> None:
    assert set(PrefillConfig.__dataclass_fields__) >= USED
