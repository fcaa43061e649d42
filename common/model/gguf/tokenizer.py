"""The tokenizer and the chat templates that a GGUF file holds, as the content of the files beside a model of Hugging Face. No torch.

Source: src/llama-vocab.cpp of ggml-org/llama.cpp, for what its keys mean and which pre-tokenizer each name stands for; the
tokenizer.json files of the models that these names come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from common.base.errors import ConfigError
from common.model.gguf.file import GgufFile

INSTEAD = "name a folder that has tokenizer.json with --tokenizer"
_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NOT_OF_TEXT = (_UNKNOWN, _CONTROL, 5, 6)
"""Kinds of tokens that no text becomes: also unused ones and single bytes."""
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
"""How tokens of sentencepiece write a space."""
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end an answer in llama.cpp, whatever the file says."""
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""The control tokens of Phi-3's sentencepiece that do not take the spaces behind them."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in (("*", "+"), ("+", "*")))
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = rf"{_WORDS[0]}{_CONTRACTIONS}?|{_WORDS[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"


class _Pre(NamedTuple):
    """How a text is cut before byte pairs are merged."""

    pattern: str | None = None
    """None: that of GPT-2."""
    digits: bool = False
    """Whether each digit is a part of its own."""
    ignores_merges: bool = False
    """Whether a part that is a token is taken whole, whatever the merges are."""
    adds_bos: bool = False
    """Whether a text begins with the token BOS, where the file does not say it."""
    normalizer: str | None = None


_GPT2_PRE, _DIGITS_PRE = _Pre(), _Pre(digits=True)
_GPT4_PRE, _LLAMA3_PRE = _Pre(_GPT4), _Pre(_GPT4, ignores_merges=True, adds_bos=True)
_PRE: dict[str, _Pre] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "jais", "trillion"), _GPT2_PRE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_PRE),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3_PRE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _GPT4_PRE),
    "qwen2": _Pre(_QWEN, normalizer="NFC"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _Pre(_QWEN)),
    "tekken": _Pre(_TEKKEN, ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Pre(_GPT4O)),
}
"""By `tokenizer.ggml.pre`."""


def end_tokens(file: GgufFile) -> list[int]:
    """The ids of the tokens that end an answer, as in llama.cpp: those that the metadata names, and those of usual texts."""
    named = [file.metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = (file.metadata.get(_PREFIX + name) for name in ("tokens", "token_type"))
    pairs = zip(tokens, kinds, strict=False) if isinstance(tokens, list) and isinstance(kinds, list) else ()
    special = (_CONTROL, _USER_DEFINED)
    found = [number for number, (token, kind) in enumerate(pairs) if kind in special and token in _ENDS]
    return [*dict.fromkeys(end for end in (*named, *found) if end is not None)]


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer.json and tokenizer_config.json, by these names.

    Raises: ConfigError, which names --tokenizer, if the file holds no tokenizer or one of an unknown kind.
    """
    vocabulary = _Vocabulary(file)
    model = file.metadata.get(f"{_PREFIX}model")
    if model == "gpt2":
        parts = _byte_level(vocabulary)
    elif model == "llama":
        parts = _sentencepiece(vocabulary)
    else:
        kind = "no tokenizer" if model is None else f"a tokenizer of kind {model!r}, which cannot be read"
        raise ConfigError(f"{file.path} holds {kind}; {INSTEAD}")
    names = ("bos", "eos", "unknown", "padding")
    special = {short: vocabulary.special(name) for name, short in zip(names, ("bos", "eos", "unk", "pad"), strict=True)}
    config: dict[str, Any] = {f"{name}_token": token for name, token in special.items() if token is not None}
    templates = dict(_templates(file))
    if templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": vocabulary.added(), **parts}
    return {"tokenizer.json": json, "tokenizer_config.json": config}


def _templates(file: GgufFile) -> Iterator[tuple[str, str]]:
    """(name, source) of each chat template, the usual one first."""
    for key in sorted(file.metadata):
        source = file.metadata[key]
        if isinstance(source, str) and (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")):
            yield key.removeprefix(_TEMPLATE).removeprefix(".") or "default", source


class _Vocabulary:
    """The tokens of a file. Raises: ConfigError if its lists do not fit each other."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise ConfigError(f"{file.path} holds no tokens; {INSTEAD}")
        self.kinds: list[int] = self._list("token_type", int) or [1] * len(self.tokens)
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.kinds) != len(self.tokens) or len(self.ids) != len(self.tokens):
            raise ConfigError(f"{file.path}: tokens are listed twice, or not all have a type; {INSTEAD}")

    def _list(self, name: str, of: type) -> list[Any]:
        found = self.file.metadata.get(_PREFIX + name) or []
        if not isinstance(found, list) or not all(type(each) is of for each in found):
            raise ConfigError(f"{self.file.path}: {_PREFIX}{name} is no list of the expected type; {INSTEAD}")
        return found

    def merges(self) -> list[list[str]]:
        """Pairs of tokens, those that are merged first first."""
        return [list(pair) for merge in self._list("merges", str) if len(pair := _cut(merge)) == 2]

    def scores(self) -> list[float]:
        """The score of each token, by id. Raises: ConfigError."""
        found = self._list("scores", float)
        if len(found) != len(self.tokens):
            raise ConfigError(f"{self.file.path}: not all tokens have a score; {INSTEAD}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        value = self.file.metadata.get(_PREFIX + name)
        return default if value is None else bool(value)

    def special(self, name: str) -> str | None:
        """The text of a special token by its name in the metadata."""
        token_id = self.file.metadata.get(f"{_PREFIX}{name}_token_id")
        return self.tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def added(self) -> list[dict[str, Any]]:
        """Entries of `added_tokens` for what is a token wherever a text holds it."""
        kept = [self.file.metadata.get(key) for key in ("general.architecture", f"{_PREFIX}model")]
        is_phi3 = kept == ["phi3", "llama"]
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                # As llama.cpp has it, whose files do not hold it.
                "rstrip": is_phi3 and kind == _CONTROL and token not in _PHI3_KEEPS_SPACES,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or token in _ENDS
        ]

    def post_processor(self, *, adds_bos: bool) -> dict[str, Any] | None:
        """Adds BOS and EOS as the file says; `adds_bos` where it does not."""
        before = self.special("bos") if self.flag("add_bos_token", adds_bos) else None
        after = self.special("eos") if self.flag("add_eos_token", False) else None
        ends = [token for token in (before, after) if token is not None]
        if not ends:
            return None

        def text(sequence: str, type_id: int) -> list[dict[str, Any]]:
            first = [] if before is None else [{"SpecialToken": {"id": before, "type_id": type_id}}]
            last = [] if after is None else [{"SpecialToken": {"id": after, "type_id": type_id}}]
            return [*first, {"Sequence": {"id": sequence, "type_id": type_id}}, *last]

        return {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": [*text("A", 0), *text("B", 1)],
            "special_tokens": {token: {"id": token, "ids": [self.ids[token]], "tokens": [token]} for token in ends},
        }


def _cut(merge: str) -> list[str]:
    """The two tokens of a merge; the first may begin with a space."""
    at = merge.find(" ", 1)
    return [merge[:at], merge[at + 1 :]] if at > 0 else []


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], **more: Any) -> dict[str, Any]:
    usual = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **more, "vocab": vocabulary.ids, "merges": merges}


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Tokens whose characters are bytes, merged in parts of the text."""
    name = vocabulary.file.metadata.get(f"{_PREFIX}pre")
    pre = _PRE.get(str(name))
    if pre is None:
        missing = "does not say how its tokenizer cuts texts" if name is None else f"needs the pre-tokenizer {name!r}"
        raise ConfigError(f"{vocabulary.file.path} {missing}, which cannot be read; {INSTEAD}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [{**byte_level, "use_regex": pre.pattern is None}]
    if pre.pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
        steps.insert(0, split)
    if pre.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": vocabulary.post_processor(adds_bos=pre.adds_bos),
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(vocabulary, vocabulary.merges(), ignore_merges=pre.ignores_merges),
    }


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Tokens of sentencepiece: neighbours that make the token with the highest score are merged first."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    begins_with_space = vocabulary.flag("add_space_prefix", True)
    prepend, strip = {"type": "Prepend", "prepend": _SPACE}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    normalizers = [prepend, replace] if begins_with_space else [replace]
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if begins_with_space else [])]
    unknown = vocabulary.special("unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": vocabulary.post_processor(adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            _merges_by_score(vocabulary),
            unk_token=unknown,
            fuse_unk=unknown is not None,
            byte_fallback=True,
        ),
    }


def _merges_by_score(vocabulary: _Vocabulary) -> list[list[str]]:
    """Every cut of every token into two tokens. As transformers orders them: by the token's score, then the longer left part."""
    ids = vocabulary.ids
    found = [
        (-score, -at, token_id)
        for token_id, (token, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores(), strict=True)
        )
        if kind not in _NOT_OF_TEXT
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [[vocabulary.tokens[each][:-at], vocabulary.tokens[each][-at:]] for _, at, each in sorted(found)]
