"""Which implementation computes a model's layers, and what is logged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.generic_models import config_of
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.model import choose
from common.model.choose import check_model, choose_model
from common.model.facts import read_facts
from common.model.generic.config import GenericConfig


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A model that no native family has."""
    config = config_of("glm")
    config.architectures = ["GlmForCausalLM"]
    config.save_pretrained(tmp_path)
    return tmp_path


def test_auto_prefers_a_native_family_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not isinstance(choose_model(make_tiny("llama", tmp_path), "auto"), GenericConfig)
    assert "model implementation: native (LlamaForCausalLM)" in caplog.text


def test_auto_takes_transformers_for_an_unknown_architecture_and_says_why(
    unknown: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(choose_model(unknown, "auto"), GenericConfig)
    assert "transformers (GlmForCausalLM): no native family has its architecture (GlmForCausalLM)" in caplog.text


def test_native_refuses_an_unknown_architecture(unknown: Path) -> None:
    for check in (choose_model, check_model):
        with pytest.raises(ConfigError, match=r"GlmForCausalLM.*is not supported; supported: "):
            check(unknown, "native")


def test_transformers_runs_what_a_native_family_refuses(tmp_path: Path) -> None:
    """OPT-350m and others could not be served at all: nodes and routers asked the native family first."""
    config = config_of("opt")
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="word_embed_proj_dim"):
        check_model(tmp_path, "auto")
    check_model(tmp_path, "transformers")
    assert isinstance(choose_model(tmp_path, "transformers"), GenericConfig)
    assert read_facts(tmp_path) == (250, 2048, (2,), "OPTForCausalLM")


def test_without_the_library_the_error_says_how_to_get_it(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "is_installed", lambda: False)
    for implementation in ("auto", "transformers"):
        with pytest.raises(ConfigError, match=r"pip install 'kvrelay\[models\]'"):
            check_model(unknown, implementation)


def test_a_corrupt_config_is_an_error_whatever_is_asked_for(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "hidden_size": -1}))
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer"):
        choose_model(folder, "auto")
