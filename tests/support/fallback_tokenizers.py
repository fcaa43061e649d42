"""A sentencepiece tokenizer like those of Llama 2 and Mistral: one token per character, or per byte of it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers


def make_fallback_tokenizer(special: Sequence[str]) -> Tokenizer:
    """`special`: special tokens, which have the first ids after that of `<unk>`."""
    first = ["<unk>", *special]
    texts = [*first, *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {text: token_id for token_id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in first])
    return tokenizer
