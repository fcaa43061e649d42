"""What `import kvrelay` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvrelay


def test_every_public_name_is_found_and_others_are_errors() -> None:
    assert dir(kvrelay) == [
        *("BadRequest", "CompletionOutput", "ConfigError", "KvRelayError", "LLM", "Logprob", "RequestOutput"),
        "SamplingParams",
    ]
    for name in dir(kvrelay):
        assert getattr(kvrelay, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        kvrelay.LLMs  # noqa: B018


def test_the_package_alone_loads_no_module_of_ours_and_offline_use_no_torch_before_it_starts() -> None:
    code = """if True:
        import sys, kvrelay
        assert not {"common", "router"} & set(sys.modules)
        from kvrelay import *
        assert LLM.__module__ == "kvrelay.offline.llm" and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
