"""Model folders of tiny encoders with random weights, as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

WORDS = [
    "a",
    "man",
    "woman",
    "is",
    "eats",
    "eating",
    "food",
    "plays",
    "the",
    "violin",
    "and",
    "sings",
    "quick",
    "brown",
    "fox",
    "over",
    "lazy",
    "dog",
    "in",
    "rain",
    "of",
    "1",
    "2",
    "3",
    "7",
]
Family = Literal["Bert", "Roberta", "XLMRoberta"]


def make_encoder(folder: Path, family: Family = "Bert", *, labels: int = 0, pooling: str = "mean") -> Path:
    """An embedding model, or with `labels` a cross-encoder; its context is 64 tokens."""
    import transformers

    transformers.logging.disable_progress_bar()
    tqdm.monitor_interval = 0  # a bar that huggingface_hub shows all the same would start a thread
    tokenizer = _tokenizer(family)
    first = 0 if family == "Bert" else 2
    config = getattr(transformers, f"{family}Config")(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64 + first,
        type_vocab_size=2 if family == "Bert" else 1,
        pad_token_id=first // 2,
        **({"num_labels": labels} if labels else {}),
    )
    torch.manual_seed(0)
    kind = "ForSequenceClassification" if labels else "Model"
    model = getattr(transformers, family + kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the default's vectors would differ too little
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    if not labels:
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{mode}": False for mode in ("cls_token", "mean_tokens", "max_tokens")}
        key = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens"}
        pool = {"word_embedding_dimension": 32, **modes, key[pooling]: True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pool))
    return folder


def _tokenizer(family: Family) -> Tokenizer:
    """Words, and the special tokens of the family at its ids."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"] if family == "Bert" else ["<s>", "<pad>", "</s>", "<unk>"]
    unknown, begin, end = special[3], special[1 if family == "Bert" else 0], special[2]
    tokenizer = Tokenizer(models.WordLevel(unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator([WORDS], trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    ids = [(token, tokenizer.token_to_id(token)) for token in (begin, end)]
    pair = f"{begin} $A {end} $B:1 {end}:1" if family == "Bert" else f"{begin} $A {end} {end} $B {end}"
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", pair=pair, special_tokens=ids)
    return tokenizer
