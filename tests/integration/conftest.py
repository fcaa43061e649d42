"""Fixtures of the tests against scripted nodes (`router_bench`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stub_node import make_model_folder
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("router") / "stub-model")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))
