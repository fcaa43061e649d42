"""A model as the router uses it: names, limits, tokenizer, templates, formats; read from the files of its folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llguidance import LLTokenizer

from common.base.errors import ConfigError
from common.config.router_options import GenerationConfig
from common.control.messages import Adapter, ModelInfo, Task
from common.model.facts import read_architecture, read_facts
from common.model.fingerprint import tokenizer_digest
from common.model.hub import is_gguf, model_folder, model_name, resolve_model
from common.model.tokenizer_folder import tokenizer_folder
from router.models.sampling_defaults import NEUTRAL, SamplingDefaults, read_sampling_defaults
from router.output.formats import OutputFormats, choose_formats
from router.structured.checker import GrammarChecker
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A loaded model. `max_model_len`: maximum length of prompt and answer together, in tokens."""

    name: str
    """The name that clients use."""
    folder: Path
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    sampling_defaults: SamplingDefaults = NEUTRAL
    tokenizer_digest: str = ""
    """Digest of the tokenizer's files, from `common.model.fingerprint.tokenizer_digest`; empty if unknown."""
    output_formats: OutputFormats = field(default_factory=OutputFormats)
    marker_ids: frozenset[int] = frozenset()
    """The special tokens that the parsers of `output_formats` must see."""
    grammars: GrammarChecker = field(default_factory=lambda: GrammarChecker(ConfigError("its tokenizer is not loaded")))
    task: Task = "generate"
    base: str = ""
    """Name under which its nodes registered it."""
    root: str = ""
    """The first of its names, also for an adapter of it: that of its metrics."""
    adapter: Adapter | None = None
    """The LoRA adapter with this name; None for a model without adapter."""
    adapter_path: str = ""
    """Where a node has read the adapter from."""
    path: str = ""
    """Where it was loaded from: a folder, a file or a name."""
    hidden_size: int = 0
    """Width of a vector, for models that embed."""
    changed_s: float = 0.0
    """When its folder was last changed, at the time of loading; Unix time."""
    architecture: str = ""
    """Name of the architecture, from `common.model.facts.ModelFacts`."""


class LoadOptions(NamedTuple):
    """How the files of a model are used. The parsers are names of formats, or "none" (`router.output.formats`)."""

    chat_template: str | None = None
    generation_config: GenerationConfig = "auto"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    fit_conversations: bool = True
    tokenizer: str | None = None
    """Folder or hub name of a tokenizer to use instead of the model's own."""


def load(name_or_path: str, name: str | None, options: LoadOptions) -> ServedModel:
    """Read config, tokenizer and sampling defaults from a model folder. Takes a second for a large vocabulary.

    Raises: ConfigError with one sentence.
    """
    path = resolve_model(name_or_path)
    folder, facts = model_folder(path), read_facts(path)
    tokenizer, digest = _tokenizer(path, options)
    tokenizer.check_template()
    tokenizer.check_vocabulary(facts.vocab_size)
    formats = choose_formats(
        tokenizer.template_source,
        lambda token: tokenizer.token_id(token) is not None,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )
    log.info("format of tool calls: %s; of reasoning: %s", *formats.names)
    eos = set(facts.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    shown = name or model_name(path)
    defaults = read_sampling_defaults(folder) if options.generation_config == "auto" else NEUTRAL
    eos_ids = frozenset(eos)
    return ServedModel(
        shown,
        folder,
        tokenizer,
        facts.max_context,
        facts.vocab_size,
        eos_ids,
        defaults,
        digest,
        formats,
        frozenset(marker for each in formats.markers if (marker := tokenizer.special_id(each)) is not None),
        GrammarChecker(_grammar_tokenizer(tokenizer, facts.vocab_size, eos_ids)),
        base=shown,
        root=shown,
        path=name_or_path,
        changed_s=folder.stat().st_mtime,
        architecture=facts.architecture,
    )


def load_pooling(info: ModelInfo, options: LoadOptions) -> ServedModel:
    """The pooling model of a node: its tokenizer and chat template. All else that the router needs is in `info`.

    Raises: ConfigError with one sentence.
    """
    path = resolve_model(info.path)
    folder = model_folder(path)
    tokenizer, digest = _tokenizer(path, options)
    if info.task == "score":
        tokenizer.check_pairs()
    return ServedModel(
        info.name,
        folder,
        tokenizer,
        info.max_model_len,
        info.vocab_size,
        frozenset(),
        tokenizer_digest=digest,
        path=info.path,
        changed_s=folder.stat().st_mtime,
        architecture="" if is_gguf(path) else read_architecture(folder),
    )


def _tokenizer(path: Path, options: LoadOptions) -> tuple[Tokenizer, str]:
    """The tokenizer of the model at `path`, or the one that the options name, and the digest of its files."""
    folder = tokenizer_folder(path, options.tokenizer)
    tokenizer = Tokenizer(folder, chat_template=options.chat_template, fits_conversations=options.fit_conversations)
    return tokenizer, tokenizer_digest(folder)


def _grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> LLTokenizer | ConfigError:
    try:
        return tokenizer.for_grammars(vocab_size, eos_ids)
    except ConfigError as error:
        log.warning("structured output is refused: %s", error)
        return error
