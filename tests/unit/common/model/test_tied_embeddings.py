"""Checkpoints whose config.json says that the LM head is the embedding, and whose files hold one of them, or both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import TINY, make_tiny
from support.runner_cases import check, drive, make_runner, prompt

from common.config.option_groups import ModelImpl
from common.model.tensor_files import TensorFiles

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("stored", ["equal", "different", "head only"])
def test_what_is_stored_counts_as_in_transformers(tmp_path: Path, stored: str, impl: ModelImpl) -> None:
    """A head that was trained by itself was left out, and the answers were those of another model."""
    folder = make_tiny("mqa", tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors[_EMBEDDING]
    tensors[_LM_HEAD] = embedding.flip(0).contiguous() if stored == "different" else embedding.clone()
    if stored == "head only":
        del tensors[_EMBEDDING]
    save_file(tensors, file, {"format": "pt"})
    prompts = [prompt(20, TINY["mqa"].vocab_size)]
    check(folder, prompts, drive(make_runner(folder, model_impl=impl), prompts, 16))


def test_tensors_of_two_dtypes_are_compared_in_the_narrower_one(tmp_path: Path) -> None:
    wide = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    tensors = {_EMBEDDING: wide, _LM_HEAD: wide.bfloat16(), "other": wide.bfloat16() * 2}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert files.tied(_EMBEDDING, _LM_HEAD) == _EMBEDDING
    assert files.tied(_EMBEDDING, "other") is None
