"""What a router reads of config.json for architectures that no native family has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.model.facts import read_facts


def write(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"], **values}))
    return folder


def test_facts_are_read_for_an_unknown_architecture(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path, vocab_size=100, n_positions=512, eos_token_id=[2, 3]))
    assert facts == (100, 512, (2, 3), "OtherForCausalLM")


def test_without_a_limit_the_nodes_decide_on_the_context(tmp_path: Path) -> None:
    assert read_facts(write(tmp_path, vocab_size=100)).max_context == 2**20


def test_a_vocabulary_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size must be a positive integer"):
        read_facts(write(tmp_path, vocab_size="many"))


def test_an_empty_generation_config_is_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").touch()
    assert read_facts(write(tmp_path, vocab_size=100, eos_token_id=2)).eos_token_ids == (2,)
