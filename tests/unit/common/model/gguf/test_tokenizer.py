"""The tokenizer of a GGUF file gives the tokens that transformers gives, and a file alone is enough to serve its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from support.gguf_files import Kind, write_gguf
from support.gguf_tokenizers import TEXTS, train, write_only_tokenizer, write_tokenizer
from support.oracle import make_tiny, save_word_tokenizer
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as bpe
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from common.base.errors import ConfigError
from common.base.variables import CACHE
from common.config.service_configs import DecodeConfig
from common.engine.grammar.shared_tokenizers import get_tokenizer
from common.model.config import load_model_config
from common.model.files import Header
from common.model.gguf.file import GgufFile, open_gguf
from common.model.gguf.tokenizer import end_tokens, tokenizer_files
from common.model.hub import DEMO_MODEL_PATH
from common.model.tokenizer_folder import tokenizer_folder
from common.node.parts import make_grammars
from common.node.plan import plan_node
from router.models.served_model import LoadOptions, load

CONTROL = dict.fromkeys(("<unk>", "<s>", "</s>", "<|im_end|>", "<|end|>"), TokenType.CONTROL)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(file: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a file, and its tokenizer_config.json."""
    files = tokenizer_files(open_gguf(file))
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"])), files["tokenizer_config.json"]


def byte_level(pattern: str, model: dict[str, Any], *, ignore_merges: bool = False) -> Tokenizer:
    """A tokenizer of bytes as a tokenizer.json of this pattern describes it."""
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(bpe.BPE(model["vocab"], merges, ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*CONTROL])
    return tokenizer


def oracle(pre: str, model: dict[str, Any]) -> Tokenizer:
    """What transformers makes of the same vocabulary and merges."""
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    if pre in ("qwen2", "gpt-2"):
        cls: Any = Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer
        return cls(vocab, merges, **special, extra_special_tokens=[*CONTROL])._tokenizer
    return byte_level(TikTokenConverter().pattern, model, ignore_merges=pre == "llama-bpe")


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "dbrx"])
def test_tokens_of_bytes_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    model = train(sentencepiece=False)
    file = write_only_tokenizer(
        tmp_path / "m.gguf", "llama", model, pre=pre, added=CONTROL, bos="<s>", add_bos_token=False
    )
    found, expected = read(file)[0], oracle(pre, model)
    for text in TEXTS:
        assert found.encode(text).ids == expected.encode(text, add_special_tokens=False).ids, text
        ids = found.encode(text).ids
        assert found.decode(ids) == expected.decode(ids)


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-4o", "HTTPServer don't 1234/\n", ["HTTPServer", " don't", " ", "123", "4", "/\n"]),
        ("tekken", "HTTPServer don't 12/\n", ["HTTPServer", " don", "'t", " ", "1", "2", "/\n"]),
        ("smollm", "it's 12  x", ["it", "'s", " ", "1", "2", " ", " x"]),
        ("starcoder", "a1b", ["a", "1", "b"]),
        ("llama-bpe", "IT'S 1234  x\n\n", ["IT", "'S", " ", "123", "4", " ", " x", "\n\n"]),
        ("qwen2", "12 cafe\u0301", ["1", "2", " café"]),
    ],
)
def test_texts_are_cut_as_the_name_of_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, text: str, parts: list[str]
) -> None:
    file = write_only_tokenizer(tmp_path / "m.gguf", "llama", train(sentencepiece=False), pre=pre, added=CONTROL)
    found = read(file)[0]
    text = found.normalizer.normalize_str(text) if found.normalizer else text
    assert found.pre_tokenizer is not None
    cuts = [span for _, span in found.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[lo:hi] for lo, hi in cuts] == parts


@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_of_sentencepiece_are_those_of_transformers(tmp_path: Path, prefix: bool) -> None:
    model = train(sentencepiece=True)
    file = write_only_tokenizer(
        tmp_path / "m.gguf",
        "llama",
        model,
        pre=None,
        added=CONTROL,
        bos="<s>",
        unknown="<unk>",
        add_space_prefix=prefix,
    )
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    cls: Any = LlamaTokenizer if prefix else GemmaTokenizer
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    expected: Tokenizer = cls(vocab, merges, **special, extra_special_tokens=[*CONTROL])._tokenizer
    found, bos = read(file)[0], vocab["<s>"]
    # This class puts no space before a text that begins with one; sentencepiece, llama.cpp and Llama 2's own file do.
    for text in (text for text in TEXTS[:-1] if not (prefix and text.startswith(" "))):
        assert found.encode(text).ids == [bos, *expected.encode(text, add_special_tokens=False).ids], text
        ids = found.encode(text, add_special_tokens=False).ids
        assert found.decode(ids) == expected.decode(ids)


def test_bos_and_eos_are_added_as_the_file_says_else_as_llama_cpp_does(tmp_path: Path) -> None:
    model = train(sentencepiece=False)

    def added(**more: Any) -> list[str]:
        file = write_only_tokenizer(
            tmp_path / "m.gguf", "llama", model, added=CONTROL, bos="<s>", eos="</s>", **{"pre": "gpt-2", **more}
        )
        return [token for token in read(file)[0].encode("a").tokens if token != "a"]

    assert added() == []
    assert added(pre="llama-bpe") == ["<s>"]
    assert added(pre="llama-bpe", add_bos_token=False) == []
    assert added(add_bos_token=True, add_eos_token=True) == ["<s>", "</s>"]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    added = {**CONTROL, "<|end|>": TokenType.USER_DEFINED, "<|im_end|>": TokenType.NORMAL}
    model = train(sentencepiece=False)
    found = read(write_only_tokenizer(tmp_path / "m.gguf", "llama", model, pre="gpt-2", added=added))[0]
    special = {token.content: token.special for token in found.get_added_tokens_decoder().values()}
    assert special == {"<unk>": True, "<s>": True, "</s>": True, "<|im_end|>": True, "<|end|>": False}
    assert found.encode("a<|end|>").tokens == ["a", "<|end|>"]


def test_spaces_after_phi_3s_control_tokens_are_dropped_as_in_its_tokenizer(tmp_path: Path) -> None:
    model = train(sentencepiece=True)
    for architecture, dropped in (("phi3", True), ("llama", False)):
        file = write_only_tokenizer(tmp_path / "m.gguf", architecture, model, pre=None, added=CONTROL, unknown="<unk>")
        tokens = read(file)[0].get_added_tokens_decoder().values()
        assert {token.content: token.rstrip for token in tokens}["<|end|>"] is dropped
        assert not {token.content: token.rstrip for token in tokens}["<s>"]


def served(tmp_path: Path, *, template: str = "{% for m in messages %}<s>{{ m.content }}{% endfor %}") -> Path:
    """A model in one file, which alone is in its folder."""
    folder = make_tiny("llama3", tmp_path / "original")
    model = train(sentencepiece=False)
    # The vocabulary of the model is 320 tokens; that of the tokenizer is shorter.
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < 320}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    alone = tmp_path / "alone"
    alone.mkdir()

    def add(writer: GGUFWriter) -> None:
        write_tokenizer(writer, model, pre="llama-bpe", added=CONTROL, template=template, unknown="<unk>")
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools | tojson }}")

    file, _ = write_gguf(folder, tmp_path, lambda name, weight: Kind.Q8_0, add_tokenizer=add)
    return file.rename(alone / "tiny.gguf")


def test_a_file_alone_is_a_model_for_nodes_and_routers(tmp_path: Path) -> None:
    file = served(tmp_path)
    plan = plan_node(DecodeConfig(model=str(file)))
    model = load(str(file), None, LoadOptions())
    assert model.name == "tiny"
    assert model.tokenizer_digest == plan.model.tokenizer != ""
    assert model.tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<s>Hi"
    assert model.tokenizer.takes_tools
    assert model.eos_token_ids == set(load_model_config(file).eos_token_ids) == {2, 3, 4}
    assert not isinstance(model.grammars, ConfigError)
    grammars = make_grammars(plan, lambda event: None)
    grammars.close()
    assert get_tokenizer(plan.tokenizer, 320, grammars.eos_ids).vocab_size == 320


def test_the_tokenizer_is_written_once_and_again_for_another_one(tmp_path: Path, cache: Path) -> None:
    file = served(tmp_path)
    folder = tokenizer_folder(file)
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert folder.parent == cache / "tokenizers"
    assert (tokenizer_folder(file), (folder / "tokenizer.json").stat().st_mtime_ns) == (folder, before)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"{{ m.content }}", b"{{ m.contents}}"))
    assert tokenizer_folder(file) != folder


def test_a_tokenizer_beside_the_file_or_given_goes_before_that_in_it(tmp_path: Path) -> None:
    file = served(tmp_path)
    given = tmp_path / "given"
    given.mkdir()
    save_word_tokenizer(given, 320)
    chosen = load(str(file), None, LoadOptions(tokenizer=str(given)))
    assert chosen.tokenizer.encode("w5 w7") == [5, 7]
    own, other = (
        plan_node(DecodeConfig(model=str(file))),
        plan_node(DecodeConfig(model=str(file), tokenizer=str(given))),
    )
    assert other.model.tokenizer == chosen.tokenizer_digest != own.model.tokenizer
    assert other.layout.fingerprint != own.layout.fingerprint
    assert tokenizer_folder(file, str(given / "tokenizer.json")) == given
    save_word_tokenizer(file.parent, 320)
    assert load(str(file), None, LoadOptions()).tokenizer.encode("w5 w7") == [5, 7]


def test_the_demo_model_as_one_file_has_its_own_tokens(tmp_path: Path) -> None:
    whole = json.loads((DEMO_MODEL_PATH / "tokenizer.json").read_text())
    added = {token["content"]: TokenType.CONTROL for token in whole["added_tokens"]}
    file = write_only_tokenizer(
        tmp_path / "m.gguf", "llama", whole["model"], pre="smollm", added=added, bos="<|bos|>", add_bos_token=True
    )
    found, expected = read(file)[0], Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    for text in (*TEXTS, "<|user|>Hi<|eos|>"):
        assert found.encode(text).ids == expected.encode(text).ids


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre": "kimi-k2"}, "needs the pre-tokenizer 'kimi-k2', which cannot be read; .*--tokenizer"),
        ({"pre": None, "kind": "t5"}, "holds a tokenizer of kind 't5', which cannot be read; .*--tokenizer"),
        ({"pre": None, "kind": None}, "holds no tokens; .*--tokenizer"),
        ({"pre": "gpt-2", "types": 3}, "not all have a type; .*--tokenizer"),
    ],
)
def test_what_cannot_be_read_is_refused_by_a_sentence_that_names_the_option(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    if change.get("kind", "") is not None:
        writer.add_tokenizer_model(change.get("kind") or "gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_types([1] * change.get("types", 2))
    if change["pre"] is not None:
        writer.add_tokenizer_pre(change["pre"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=says) as caught:
        tokenizer_folder(tmp_path / "m.gguf")
    assert "\n" not in caught.value.message


def test_templates_are_read_by_name(tmp_path: Path) -> None:
    config = tokenizer_files(open_gguf(served(tmp_path)))["tokenizer_config.json"]
    assert [entry["name"] for entry in config["chat_template"]] == ["default", "tool_use"]


@pytest.mark.parametrize("tokens", [3, "abc", [1, 2, 3], None])
@pytest.mark.parametrize("kinds", [3, "abc", ["a"], [3, 3, 3], None])
def test_lists_of_other_types_are_refused_and_name_no_ends(tmp_path: Path, tokens: Any, kinds: Any) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    file = GgufFile(tmp_path / "m.gguf", Header(b"", 0, {}), metadata, {})
    assert end_tokens(file) == []
    with pytest.raises(ConfigError, match="--tokenizer"):
        tokenizer_files(file)
