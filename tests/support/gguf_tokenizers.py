"""Tokenizers of Hugging Face written into GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXTS = (
    "Hello world, it's 12345 o'clock.\n\n\n  I'LL go… ",
    "def f(x):\n\treturn x/1000  # é ñ ½ ﬁ cafe\u0301",
    "日本語のテキスト、漢字。🙂👩‍👩‍👧 Привет",
    "   leading and    inner spaces \r\n\r\n x86_64 HTTPServer's 3.14",
    "",
    " ",
    "<|end|>not a token<|im_end|>",
)


def train(*, sentencepiece: bool, digits: bool = False) -> dict[str, Any]:
    """A small BPE model as in tokenizer.json, of bytes or, with `sentencepiece`, of characters with bytes for rare ones."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.Digits(individual_digits=True), byte_level] if digits else [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if sentencepiece else pre_tokenizers.Sequence(parts)
    specials = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|end|>"]
    if sentencepiece:
        specials += [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = [] if sentencepiece else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + len(alphabet) + 180,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in TEXTS[:4] for _ in range(3)], trainer)
    return json.loads(tokenizer.to_str())["model"]


def write_tokenizer(
    writer: GGUFWriter, model: Mapping[str, Any], *, pre: str | None, added: Mapping[str, TokenType], **keys: Any
) -> None:
    """`model`: of tokenizer.json. `pre`: None means sentencepiece. `added`: the tokens that no text becomes. `keys`: values under
    `tokenizer.ggml.`; `template` is the chat template.
    """
    vocab: Mapping[str, int] = model["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = [added.get(token, TokenType.BYTE if _is_byte(token) else TokenType.NORMAL) for token in tokens]
    merges = [merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2" if pre is not None else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        rank = {a + b: float(-number) for number, (a, b) in reversed([*enumerate(merges)])}
        writer.add_token_scores([rank.get(token, 0.0) for token in tokens])
    for key, value in keys.items():
        if key == "template":
            writer.add_chat_template(value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", vocab[value])


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def write_only_tokenizer(file: Path, architecture: str, model: Mapping[str, Any], **more: Any) -> Path:
    """A file without tensors, otherwise as `write_tokenizer`. Returns `file`."""
    writer = GGUFWriter(file, architecture)
    write_tokenizer(writer, model, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file
