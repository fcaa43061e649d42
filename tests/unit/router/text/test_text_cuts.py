"""A long text in pieces has the tokens of the whole, whatever it consists of; and no text takes memory without bound."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.fallback_tokenizers import make_fallback_tokenizer
from support.paths import ROOT
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from common.base.errors import BadRequest
from common.model.hub import DEMO_MODEL_PATH
from router.text import text_cuts
from router.text.text_cuts import MAX_PIECE_CHARS, groups_of
from router.text.tokenizer import Part, Tokenizer
from router.text.typed_tokens import SEPARATOR

_LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = [
    "word",
    "Über",
    "it's",
    "12345",
    "don't",
    "!",
    "!!!",
    "(x)",
    "a_b",
    "日本語。",
    "🎉",
    "x=1;",
    "e\u0301",
    "I'LL",
]
_GAPS = [" ", " ", " ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "   ", "\n ", "\u00a0", ""]
_MARKS = ["<|bos|>", "<|user|>", "<|eos|>"]


def bytes_tokenizer(split: pre_tokenizers.PreTokenizer, *added: AddedToken) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    rng = random.Random(1)
    raw.train_from_iterator([hostile(rng, 300) for _ in range(40)], trainer)
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS] + list(added))
    raw.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>",
        special_tokens=[(mark, raw.token_to_id(mark)) for mark in ("<|bos|>", "<|eos|>")],
    )
    return raw


def hostile(rng: random.Random, count: int, marks: bool = False) -> str:
    words = _WORDS + (_MARKS if marks else [])
    return "".join(rng.choice(words) + rng.choice(_GAPS) for _ in range(count))


def _gpt2() -> RawTokenizer:
    return bytes_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _llama3() -> RawTokenizer:
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(_LLAMA), "isolated")
    return bytes_tokenizer(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)]))


def _strips() -> RawTokenizer:
    token = AddedToken("<|pad|>", special=True, rstrip=True, lstrip=True, normalized=False)
    return bytes_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), token)


def _crosses() -> RawTokenizer:
    """A vocabulary with tokens that reach across spaces, as in SuperBPE."""
    return bytes_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def _bert() -> RawTokenizer:
    raw = RawTokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=50))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    raw.train_from_iterator([hostile(random.Random(1), 2000)], trainer)
    raw.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return raw


def _stripping_normalizer() -> RawTokenizer:
    raw = _gpt2()
    raw.normalizer = normalizers.Strip()
    return raw


TOKENIZERS = {
    "gpt2": _gpt2,
    "llama 3": _llama3,
    "special tokens that take spaces": _strips,
    "tokens across spaces": _crosses,
    "wordpiece": _bert,
    "a normalizer that strips": _stripping_normalizer,
    "sentencepiece": lambda: make_fallback_tokenizer(_MARKS),
}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text_cuts, sys.modules[Tokenizer.__module__]):
        monkeypatch.setattr(module, "PIECE_CHARS", 20)


def load(raw: RawTokenizer, folder: Path) -> Tokenizer:
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_have_the_tokens_of_the_whole(name: str, tmp_path: Path) -> None:
    raw = TOKENIZERS[name]()
    tokenizer, rng = load(raw, tmp_path), random.Random(7)
    cut = 0
    for number in range(60):
        text = hostile(rng, 80, marks=number % 2 == 1)
        for special in (False, True):
            whole = raw.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == whole
            for limit in (3, 50):
                first = tokenizer.encode(text, add_special_tokens=special, part=Part(limit))
                assert first[:limit] == whole[:limit]
                last = tokenizer.encode(text, add_special_tokens=special, part=Part(limit, from_end=True))
                assert last[-limit:] == whole[-limit:]
                if len(first) == len(whole):
                    assert first == whole, "what is missing can be seen by the length"
        cut += len(list(tokenizer._cuts.pieces(text))) > 1
    only_at_marks = name in ("tokens across spaces", "a normalizer that strips")
    assert cut == (30 if only_at_marks else 60)


@pytest.mark.usefixtures("short_pieces")
def test_a_long_conversation_has_the_tokens_of_its_parts(tmp_path: Path) -> None:
    raw = _llama3()
    tokenizer, rng = load(raw, tmp_path), random.Random(3)
    parts = [hostile(rng, 30, marks=True) for _ in range(5)]
    whole = [token_id for part in parts for token_id in raw.encode(part, add_special_tokens=False).ids]
    assert tokenizer.encode_chat(SEPARATOR.join(parts)) == whole
    assert tokenizer.encode_chat(SEPARATOR.join(parts), part=Part(9, from_end=True))[-9:] == whole[-9:]


def test_a_batch_has_the_tokens_of_each_text(tmp_path: Path) -> None:
    raw = _gpt2()
    tokenizer, rng = load(raw, tmp_path), random.Random(3)
    texts = [hostile(rng, count) for count in (1, 5, 9_000, 3, 9_000, 40_000, 0, 2)]
    assert tokenizer.encode_batch(texts) == [raw.encode(text).ids for text in texts]
    assert [len(group) for group in groups_of(texts)] == [2, 1, 1, 1, 1, 2] or len(list(groups_of(texts))) > 3


@pytest.mark.parametrize("text", ["a", "\n", "ab", "é", "  "])
def test_a_text_that_cannot_be_cut_is_refused_where_it_takes_too_much(text: str) -> None:
    tokenizer = Tokenizer(DEMO_MODEL_PATH)
    with pytest.raises(BadRequest, match="characters in a row without a single space or line break"):
        tokenizer.encode(text * (MAX_PIECE_CHARS + 1))


@pytest.mark.parametrize("text", ["word ", "! ", "<|eos|>", "x\n"])
def test_tokenizing_takes_a_bounded_multiple_of_a_text(text: str) -> None:
    """In a process of its own, whose peak is its own; 40 MB for what tokenizing needs once."""
    program = f"""
from common.base.free_memory import peak_memory_bytes
from common.model.hub import DEMO_MODEL_PATH
from router.text.tokenizer import Tokenizer
tokenizer = Tokenizer(DEMO_MODEL_PATH)
text = {text!r} * (4_000_000 // {len(text)})
tokenizer.encode("warm " * 10_000)
before = peak_memory_bytes()
tokenizer.encode(text)
print(peak_memory_bytes() - before)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(said.stdout) < 25 * 4_000_000
