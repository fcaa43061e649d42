"""`kvrelay up` refuses nodes whose KV caches do not fit in memory together."""

from __future__ import annotations

import math

import pytest
from support.up_plan import planned

from common.base.errors import ConfigError
from kvrelay.up.plan import check_memory


def fits(free_gb: float, /, *, gpu: str = "", file: str = "", **flags: str) -> None:
    """Raises: ConfigError where `kvrelay up` refuses."""
    environ = {"KVRELAY_CONFIG": file} if file else {}
    check_memory(planned(environ, flags, gpu=gpu), environ, free_gb * 2**30, gpus=bool(gpu))


def test_nodes_whose_kv_does_not_fit_together_are_refused_with_the_figures() -> None:
    sizes = {"prefill": "2", "decode": "1", "decode_tp": "2", "decode_pp_layers": "1,1,2"}
    fits(8.0, **sizes)
    with pytest.raises(ConfigError) as refusal:
        fits(7.9, **sizes)
    assert "8.00 GB of memory together (prefill-0 1.00, prefill-1 1.00, decode-0 6.00), but 7.90 GB" in str(
        refusal.value
    )
    assert "--kv-memory-gb" in str(refusal.value)
    fits(4.0, **sizes, kv_memory_gb="0.5")
    with pytest.raises(ConfigError, match=r"20.00 GB of memory together"):
        fits(16.0, kv_memory_gb="10")
    fits(math.inf, kv_memory_gb="10")  # where no system tells


def test_options_from_a_nodes_own_table_count(tmp_path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("kv_memory_gb = 0.5\n[decode]\nkv_memory_gb = 3\n")
    fits(3.5, file=str(file))
    with pytest.raises(ConfigError, match=r"prefill-0 0.50, decode-0 3.00"):
        fits(3.4, file=str(file))


def test_only_kv_in_memory_of_a_known_size_counts() -> None:
    fits(0.1, gpu="0")
    fits(0.1, kv_blocks="60")
    with pytest.raises(ConfigError):
        fits(0.1, gpu="0", device="cpu")
