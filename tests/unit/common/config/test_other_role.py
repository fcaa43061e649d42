from __future__ import annotations

from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.config.other_role import in_other_role
from common.config.service_configs import DecodeConfig, PrefillConfig
from common.config.sources import resolve


def test_flags_that_both_roles_have_stay_and_others_are_left_out() -> None:
    resolved = resolve(
        DecodeConfig,
        flags={"model": "m", "threads": "3", "local_prefill_chunk": "7", "tls_dir": "none"},
        environ={},
        file=None,
    )
    config = in_other_role(resolved, PrefillConfig, {})
    assert (config.model, config.threads, config.section) == ("m", 3, "prefill")


def test_options_of_the_other_role_change_them_and_null_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text("[prefill]\nmax_num_seqs = 5\n[decode]\nmax_num_seqs = 9\nlocal_prefill_chunk = 11\n")
    environ = {"KVRELAY_CONFIG": str(file), "KVRELAY_LEASE_S": "2"}
    flags = {
        "nice": "5",
        "max_num_batched_tokens": "99",
        "in_other_role": '{"nice": null, "speculate": "ngram", "threads": 2}',
    }
    resolved = resolve(PrefillConfig, flags=flags, environ=environ, file=None)
    config = in_other_role(resolved, DecodeConfig, environ)
    assert (config.nice, config.max_num_batched_tokens, config.threads, config.lease_s) == (0, 99, 2, 2.0)
    assert (config.speculate, config.max_num_seqs, config.local_prefill_chunk) == ("ngram", 9, 11)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "not valid JSON"), ("[1]", "not a JSON object"), ('{"nice": [1]}', "not a JSON object of options")],
)
def test_a_malformed_object_is_refused_at_the_start(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(PrefillConfig, flags={"in_other_role": text}, environ={}, file=None)


def test_an_unknown_option_suggests_the_near_one() -> None:
    resolved = resolve(PrefillConfig, flags={"in_other_role": '{"thread": 2}'}, environ={}, file=None)
    with pytest.raises(ConfigError, match="unknown option 'thread'; did you mean 'threads'"):
        in_other_role(resolved, DecodeConfig, {})
