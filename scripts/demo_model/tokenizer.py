"""The demo model's tokenizer: byte-level BPE, so that any UTF-8 text survives the round trip."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.demo_model.corpus import BOS, CHAT_TEMPLATE, EOS, SPECIAL_TOKENS

VOCAB_SIZE = 2048


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """A BPE of `VOCAB_SIZE` tokens: the special tokens, the 256 bytes, then merges learnt from `documents`.

    Digits stay single tokens: a small model then learns sums digit by digit. Encoding puts `BOS` first
    unless it is told to add no special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # A BPE trainer does not know special tokens as such and would learn merges inside them.
    texts = (text for document in documents for text in _between_special_tokens(document))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def _between_special_tokens(document: str) -> list[str]:
    for token in SPECIAL_TOKENS:
        document = document.replace(token, "\0")
    return [text for text in document.split("\0") if text]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    settings = {
        # The generic class: a Llama class would bring its own pre-tokenizer in place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": SPECIAL_TOKENS[2:],
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", {**named, "additional_special_tokens": SPECIAL_TOKENS[2:]})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
