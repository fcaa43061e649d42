"""What the demo's training sees: loss only where the model speaks, and no document through another's eyes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch

from common.model.hub import DEMO_MODEL_PATH
from common.tools import demo
from common.tools.demo.train import answer_labels, document_mask, windows

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


def test_readme_reports_the_figures_of_the_shipped_model():
    report = json.loads((DEMO_MODEL_PATH / "training.json").read_text(encoding="utf-8"))
    readme = Path(demo.__file__).with_name("README.md").read_text(encoding="utf-8")
    for key in ("final_train_loss", "held_out_loss"):
        assert f"{report[key]:.4f} nats" in readme
    for key in ("parameters", "train_tokens", "held_out_tokens", "steps", "trained_tokens"):
        assert f"{report[key]:,}" in readme
