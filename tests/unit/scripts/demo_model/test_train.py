"""What the demo's training sees: loss only where the model speaks, and no document through another's eyes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from common.model.hub import DEMO_MODEL_PATH
from scripts import demo_model as demo
from scripts.demo_model.tokenizer import save_tokenizer, train_tokenizer
from scripts.demo_model.train import (
    answer_labels,
    document_mask,
    earlier_runs,
    load_start,
    model_config,
    save_weights,
    windows,
)

BOS, EOS, SYSTEM, USER, ASSISTANT = range(5)
# A chat, a plain text with BOS, one without, and a chat cut off in its system message.
PACKED = [BOS, USER, 50, EOS, ASSISTANT, 60, EOS, BOS, 70, EOS, 80, EOS, BOS, SYSTEM, 5]


def test_loss_is_taken_on_answers_and_plain_text_only():
    labels = answer_labels(torch.tensor([PACKED]))[0].tolist()
    assert labels == [BOS, -100, -100, -100, -100, 60, EOS, BOS, 70, EOS, 80, EOS, BOS, -100, -100]


def test_a_packed_document_sees_itself_up_to_the_present_and_nothing_else():
    visible = document_mask(torch.tensor([PACKED]))[0, 0]
    starts = [0] * 7 + [7] * 3 + [10] * 2 + [12] * 3
    for row, start in enumerate(starts):
        assert visible[row].nonzero().flatten().tolist() == list(range(start, row + 1))


def test_windows_are_full_and_begin_with_a_document():
    documents = [[BOS, 10, 11, EOS], [BOS, 12, EOS]]
    source = windows(documents, 10, Random(0))
    for _ in range(20):
        window = next(source)
        assert len(window) == 10
        assert window[0] == BOS


@pytest.fixture
def no_progress_bars() -> Iterator[None]:
    """Without the thread that watches them."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.usefixtures("no_progress_bars")
def test_a_run_goes_on_from_a_model_with_another_tokenizer(tmp_path):
    before = LlamaForCausalLM(model_config(2048))
    old = train_tokenizer(["a capital city. " * 9, "the weather"])
    save_weights(before, tmp_path)
    save_tokenizer(old, tmp_path, 2048)
    new = train_tokenizer(["get_weather get_weather", "a capital city. " * 9])
    after = LlamaForCausalLM(model_config(new.get_vocab_size()))
    load_start(after, new, tmp_path)

    stored = {name: weight.to(torch.bfloat16).float() for name, weight in before.state_dict().items()}
    first, rows = stored["model.embed_tokens.weight"], after.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(rows[new.token_to_id("a")], first[old.token_to_id("a")])
    assert old.token_to_id("get") is None
    spelt = first[[old.token_to_id(letter) for letter in "get"]]
    assert torch.allclose(rows[new.token_to_id("get")], spelt.mean(0), atol=1e-6)
    projection = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(after.state_dict()[projection], stored[projection])


def test_runs_are_listed_oldest_first(tmp_path):
    assert earlier_runs(None) == []
    run = {"config": {}, "steps": 2, "trained_tokens": 3, "wall_time_s": 4.0}
    (tmp_path / "training.json").write_text(json.dumps({**run, "steps": 5, "scores": {}, "earlier_runs": [run]}))
    assert earlier_runs(tmp_path) == [run, {**run, "steps": 5}]


def test_readme_reports_the_figures_of_the_shipped_model():
    report = json.loads((DEMO_MODEL_PATH / "training.json").read_text(encoding="utf-8"))
    readme = Path(demo.__file__).with_name("README.md").read_text(encoding="utf-8")
    for key in ("final_train_loss", "held_out_loss"):
        assert f"{report[key]:.4f} nats" in readme
    for key in ("parameters", "train_tokens", "held_out_tokens", "steps", "trained_tokens"):
        assert f"{report[key]:,}" in readme
