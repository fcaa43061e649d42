"""Incremental detokenization against the tokenizers' own decoding of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from router.text.detokenizer import REPLACEMENT, Detokenizer, TokenPieces

CORPUS = ["the capital of France is Paris, naïve café", "你好 世界 中文 ", "emoji 🎉👩‍👩‍👧 end", "  two  spaces\n\n"]


def make_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_tokens([AddedToken("<tool 工具>", special=False)])
    return tokenizer


def make_byte_fallback(*, strip: bool) -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "▁cat", "s", "a", "é", "▁中", "文", "▁▁", ","]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = make_byte_level()
FALLBACK = {strip: make_byte_fallback(strip=strip) for strip in (True, False)}
PIECES = {id(tokenizer): TokenPieces(tokenizer) for tokenizer in (BYTE_LEVEL, *FALLBACK.values())}


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    stream = Detokenizer(PIECES[id(tokenizer)], skip_special_tokens=skip_special_tokens)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40), skip=st.booleans())
def test_byte_level_deltas_join_to_the_whole_decoding_for_any_ids(ids: list[int], skip: bool) -> None:
    joined = "".join(deltas(BYTE_LEVEL, ids, skip_special_tokens=skip))
    assert joined == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


words = st.sampled_from(["▁", "▁the", "▁cat", "s", "a", "é", "▁中", "文", "▁▁", ",", "<s>", "</s>", "<unk>"])
runs = st.text(min_size=1, max_size=4).filter(lambda text: not any(0xD800 <= ord(char) <= 0xDFFF for char in text))
broken_runs = st.binary(min_size=1, max_size=5).map(lambda data: b"\xff" + data)


@settings(max_examples=200, deadline=None)
@given(
    strip=st.booleans(),
    parts=st.lists(
        st.one_of(words, runs.map(str.encode), broken_runs),
        max_size=12,
    ),
)
def test_byte_fallback_deltas_join_to_the_whole_decoding(strip: bool, parts: list[str | bytes]) -> None:
    tokenizer = FALLBACK[strip]
    ids: list[int] = []
    for before, part in zip([None, *parts], parts, strict=False):
        if isinstance(part, bytes):
            if isinstance(before, bytes):
                ids.append(tokenizer.token_to_id(","))  # ends the run: a joined one is the exception tested below
            ids += byte_ids(tokenizer, part)
        elif part.startswith("<"):
            ids += [tokenizer.token_to_id(part), tokenizer.token_to_id(",")]
        else:
            ids.append(tokenizer.token_to_id(part))
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def test_byte_run_that_turns_invalid_keeps_the_characters_already_sent() -> None:
    tokenizer = FALLBACK[True]
    ids = byte_ids(tokenizer, "é".encode() + b"\xe4\xb8\xff")
    assert deltas(tokenizer, ids) == ["", "é", "", "", REPLACEMENT * 3, ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK[True]])
def test_character_split_over_tokens_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    if tokenizer is BYTE_LEVEL:
        chars = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🎈")[0][0]
        ids = [tokenizer.token_to_id(char) for char in chars]
    else:
        ids = byte_ids(tokenizer, "🎈".encode())
    assert deltas(tokenizer, ids) == ["", "", "", "🎈", ""]
    assert "".join(deltas(tokenizer, ids[:3])) == tokenizer.decode(ids[:3])


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.Metaspace(), decoders.BPEDecoder(), None],
    ids=["wordpiece", "metaspace", "bpe", "none"],
)
def test_other_decoders_deltas_join_to_the_whole_decoding(decoder: decoders.Decoder | None) -> None:
    vocab = ["[UNK]", "the", "##s", "▁cat", "dog</w>", ".", "n't", "▁", "x"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocab)}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[UNK]"])
    pieces = TokenPieces(tokenizer)
    for ids in ([1, 2, 3, 5], [3, 3, 4, 4, 1], [4, 8, 4], [0, 3, 0, 7, 3], [7, 3]):
        stream = Detokenizer(pieces)
        joined = "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])
        assert joined == tokenizer.decode(ids), ids


def test_piece_gives_the_exact_bytes_of_part_of_a_character() -> None:
    char = chr(256 + 0x21 + (0x80 - 0x7F))  # byte 0x80 in a byte-level vocabulary
    assert PIECES[id(BYTE_LEVEL)].piece(BYTE_LEVEL.token_to_id(char)) == b"\x80"
    assert PIECES[id(FALLBACK[True])].piece(FALLBACK[True].token_to_id("▁cat")) == b" cat"


def test_visible_special_tokens_are_not_skipped() -> None:
    ids = BYTE_LEVEL.encode("<s>cat</s>").ids
    pieces = TokenPieces(BYTE_LEVEL)
    end = BYTE_LEVEL.token_to_id("</s>")
    detokenizer = Detokenizer(pieces, visible=frozenset([end]))
    assert "".join(map(detokenizer.push, ids)) == "cat</s>"


@settings(max_examples=200, deadline=None)
@given(strip=st.booleans(), prompt=st.lists(words, min_size=1, max_size=5), answer=st.lists(words, max_size=5))
def test_an_answer_is_what_it_adds_to_the_prompts_text(strip: bool, prompt: list[str], answer: list[str]) -> None:
    """Also its first space, which the tokenizer strips from the beginning of a text."""
    tokenizer = FALLBACK[strip]
    before, ids = ([tokenizer.token_to_id(word) for word in part] for part in (prompt, answer))
    stream = Detokenizer(PIECES[id(tokenizer)], prompt_ids=before)
    text = "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])
    assert tokenizer.decode(before) + text == tokenizer.decode(before + ids)


def test_behind_special_tokens_alone_a_text_begins() -> None:
    tokenizer = FALLBACK[True]
    the = tokenizer.token_to_id("▁the")
    begun = (["a", "<s>"], ["a", "<0x0A>"], ["<s>", "<0x0A>"])
    for prompt, text in ((["<s>"], "the"), ([], "the"), *((each, " the") for each in begun)):
        ids = [tokenizer.token_to_id(word) for word in prompt]
        assert Detokenizer(PIECES[id(tokenizer)], prompt_ids=ids).push(the) == text
