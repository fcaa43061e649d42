"""The options of every service: bounds, help texts, and defaults that agree."""

from __future__ import annotations

import dataclasses

import pytest

from common.base.errors import ConfigError
from common.config.fields import field_infos
from common.config.service_configs import SERVICES, DecodeConfig, UpConfig
from common.config.sources import field_types, resolve, type_label


@pytest.mark.parametrize(
    "flags",
    [
        {"port": "-1"},
        {"port": "65536"},
        {"max_num_seqs": "0"},
        {"kv_memory_gb": "nan"},
        {"lease_s": "inf"},
        {"nice": "20"},
    ],
)
def test_values_out_of_range_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        resolve(DecodeConfig, flags=flags, environ={}, file=None)


def test_up_and_the_services_agree_on_every_shared_default() -> None:
    theirs = {f.name: f.default for service in SERVICES[:3] for f in dataclasses.fields(service)}
    ours = {f.name: f.default for f in dataclasses.fields(UpConfig)}
    own = {name for name, info in field_infos(UpConfig).items() if info.own} | {"redis_url", "model"}
    assert {n: v for n, v in ours.items() if n in theirs and n not in own} == {
        n: theirs[n] for n in ours if n in theirs and n not in own
    }


def test_every_field_has_help_and_a_type_that_can_be_parsed() -> None:
    for service in SERVICES:
        for name, info in field_infos(service).items():
            assert info.help.endswith("."), f"{service.__name__}.{name}"
            assert type_label(field_types(service)[name])
