"""Perplexity of a model on the demo model's held-out text, through the model code that nodes run."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from common.attention.base import AttentionMetadata
from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.config.option_groups import Quantization
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.hub import DEMO_MODEL_PATH
from common.model.kv_spec import kv_spec
from common.model.loader import load_model
from common.model.rank_model import HIDDEN
from scripts.demo_model.corpus import make_corpus
from scripts.demo_model.train import answer_labels

_BLOCK = 16
_MAX_TOKENS = 512


@functools.cache
def held_out_documents(num_documents: int) -> list[list[int]]:
    """Tokens of documents that the demo model was not trained on."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    texts = make_corpus(1, 60 * num_documents).held_out[:num_documents]
    assert len(texts) == num_documents
    return [tokenizer.encode(text, add_special_tokens=False).ids[:_MAX_TOKENS] for text in texts]


@functools.cache
@torch.inference_mode()
def perplexity(
    path: Path, *, dtype: str = "bfloat16", quantization: Quantization = "auto", num_documents: int = 100
) -> float:
    """exp of the mean negative log-likelihood of the tokens that the model learnt to predict: all but users' words."""
    config = load_model_config(path)
    model = load_model(
        path, config, dtype=dtype, load_format="auto", seed=0, small_batches=True, quantization=quantization
    )
    layout = KVLayout("f", kv_spec(config, dtype))
    blocks = list(range(_MAX_TOKENS // _BLOCK))
    storage = KVStorage(layout, layout.shard(0, 0), len(blocks), scales=[model.kv_scales])
    attention = attention_of_groups(storage, model.attention_shapes(_BLOCK), CpuAttention)
    total, count = 0.0, 0
    for document in held_out_documents(num_documents):
        ids, places = torch.tensor(document), torch.arange(len(document))
        attention.plan(AttentionMetadata([len(document)], [len(document)], [blocks], places))
        logits = model.logits(model.forward(ids, places, attention)[HIDDEN])
        assert logits is not None
        labels = answer_labels(ids[None])[0, 1:]
        total += float(F.cross_entropy(logits[:-1], labels, reduction="sum"))
        count += int((labels >= 0).sum())
    return math.exp(total / count)
