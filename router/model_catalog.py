"""The model that this router serves: name, limits and tokenizer, from the router's configuration and from the nodes.

Runs on the router's event loop; tokenizers are loaded on a thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from llguidance import LLTokenizer

from common.base.errors import ConfigError, NotFound, Unavailable
from common.config.fields import listed
from common.config.option_groups import GenerationConfig
from common.control.messages import ModelInfo, NodeRecord, Task
from common.engine.grammar.compile import load_tokenizer
from common.model.config import load_model_config
from common.model.fingerprint import tokenizer_digest
from common.model.hub import model_folder, model_name, resolve_model
from router.output.formats import OutputFormats, check_names, choose_formats
from router.sampling_defaults import NEUTRAL, SamplingDefaults, read_sampling_defaults
from router.structured.checker import GrammarChecker
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A loaded model. `max_model_len`: maximum length of prompt and answer together, in tokens."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    sampling_defaults: SamplingDefaults = NEUTRAL
    tokenizer_digest: str = ""
    """As `common.model.fingerprint.tokenizer_digest`."""
    output_formats: OutputFormats = field(default_factory=OutputFormats)
    marker_ids: frozenset[int] = frozenset()
    """The special tokens that the parsers of `output_formats` must see."""
    grammars: GrammarChecker = field(default_factory=lambda: GrammarChecker(ConfigError("its tokenizer is not loaded")))
    task: Task = "generate"
    base: str = ""
    """Name under which its nodes registered it."""
    hidden_size: int = 0
    """Width of a vector, for models that embed."""


class LoadOptions(NamedTuple):
    """How the files of a model are used; the parsers are as in `router.output.formats.choose_formats`."""

    chat_template: str | None = None
    generation_config: GenerationConfig = "auto"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


def load(name_or_path: str, name: str | None, options: LoadOptions) -> ServedModel:
    """Read config, tokenizer and sampling defaults from a model folder. Takes a second for a large vocabulary.

    Raises: ConfigError with one sentence.
    """
    path = resolve_model(name_or_path)
    folder = model_folder(path)
    config = load_model_config(path)
    tokenizer = Tokenizer(folder, chat_template=options.chat_template)
    formats = choose_formats(
        tokenizer.template_source,
        lambda token: tokenizer.token_id(token) is not None,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )
    log.info("format of tool calls: %s; of reasoning: %s", *formats.names)
    eos = set(config.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    shown = name or model_name(Path(name_or_path))
    defaults = read_sampling_defaults(folder) if options.generation_config == "auto" else NEUTRAL
    digest = tokenizer_digest(path)
    eos_ids = frozenset(eos)
    return ServedModel(
        shown,
        folder,
        tokenizer,
        config.max_context,
        config.vocab_size,
        eos_ids,
        defaults,
        digest,
        formats,
        frozenset(marker for each in formats.markers if (marker := tokenizer.special_id(each)) is not None),
        GrammarChecker(_grammar_tokenizer(folder, config.vocab_size, eos_ids)),
    )


def _grammar_tokenizer(folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> LLTokenizer | ConfigError:
    try:
        return load_tokenizer(folder, vocab_size, eos_ids)
    except ConfigError as error:
        log.warning("structured output is refused: %s", error)
        return error


class ModelCatalog:
    """The content of `/v1/models`: one model under each of its names, or none until the configuration or a node names one."""

    def __init__(
        self,
        *,
        model: str | None,
        served_model_name: str | None,
        chat_template: str | None,
        generation_config: GenerationConfig = "auto",
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._configured = model
        self._served_names = listed("served_model_name", served_model_name)
        check_names(tool_call_parser, reasoning_parser)
        self._load_options = LoadOptions(chat_template, generation_config, tool_call_parser, reasoning_parser)
        self._model: ServedModel | None = None
        self._by_name: dict[str, ServedModel] = {}
        """The model under each name that clients may use; the first is the main one."""
        self._nodes_name: str | None = None
        """Model name of the nodes in use."""
        self._loading: asyncio.Task[None] | None = None
        self._loaded_path: str | None = None
        self._problem = "no node has registered a model yet"

    async def load_configured(self) -> None:
        """Load the configured model, if there is one.

        Raises: ConfigError when it cannot be used.
        """
        if self._configured is not None:
            name = self._served_names[0] if self._served_names else None
            self._serve(await asyncio.to_thread(load, self._configured, name, self._load_options))

    def accept(self, records: list[NodeRecord]) -> list[NodeRecord]:
        """Return the nodes that serve this router's model. Settings that the configuration leaves open come from them."""
        names = [record.model.name for record in sorted(records, key=lambda record: record.started_at)]
        if names and self._nodes_name not in names:
            self._nodes_name = names[0]
        mine = [record for record in records if record.model.name == self._nodes_name]
        for record in records:
            if record.model.name != self._nodes_name:
                log.warning(
                    "%s is ignored: it serves %s, not %s", record.peer.node_id, record.model.name, self._nodes_name
                )
        mine = self._with_our_tokenizer(mine)
        infos = [record.model for record in mine if record.role == "decode"] or [record.model for record in mine]
        if infos:
            self._learn(infos)
        return mine

    def _with_our_tokenizer(self, records: list[NodeRecord]) -> list[NodeRecord]:
        """The nodes with the same tokenizer as this router.

        If there is none and the model was not configured here, all nodes: the router then loads their tokenizer.
        """
        if self._model is None:
            return records
        ours = self._model.tokenizer_digest
        same = [record for record in records if record.model.tokenizer in (ours, "")]
        if not same and self._configured is None:
            return records
        for record in records:
            if record not in same:
                log.error("%s is ignored: its tokenizer.json differs from this router's", record.peer.node_id)
        return same

    def get(self, name: str | None) -> ServedModel:
        """The model that a client named (None: the served one).

        Raises: NotFound for another name, Unavailable when nothing is known yet.
        """
        main = self._model
        if main is None:
            raise Unavailable(f"the model is not known yet: {self._problem}")
        model = main if name is None else self._by_name.get(name)
        if model is None:
            raise NotFound(
                f"the model {str(name)[:200]!r} does not exist; this server has {', '.join(map(repr, self._by_name))}",
                param="model",
                code="model_not_found",
            )
        return model

    @property
    def models(self) -> list[ServedModel]:
        """The served model under each of its names; the main one first."""
        return list(self._by_name.values())

    @property
    def model(self) -> ServedModel | None:
        """The served model, once it is known."""
        return self._model

    def close(self) -> None:
        """Stop loading."""
        if self._loading is not None:
            self._loading.cancel()

    def _learn(self, infos: list[ModelInfo]) -> None:
        max_len = min(info.max_model_len for info in infos)
        if self._configured is not None:
            if self._model is not None:
                self._adopt(self._model, infos[0], max_len)
            return
        path = infos[0].path
        if (
            self._model is not None
            and self._loaded_path == path
            and infos[0].tokenizer in (self._model.tokenizer_digest, "")
        ):
            self._adopt(self._model, infos[0], max_len)
        elif self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self._load_from_node(infos[0], max_len))

    async def _load_from_node(self, info: ModelInfo, max_len: int) -> None:
        try:
            model = await asyncio.to_thread(load, info.path, info.name, self._load_options)
        except ConfigError as error:
            self._problem = f"{error}; give the router a folder with --model"
            log.error("cannot use the model that the nodes registered: %s", self._problem)
            return
        except Exception as error:  # a model folder can hold anything; clients must be told that it cannot be loaded
            self._problem = f"{info.path} cannot be loaded: {type(error).__name__}; see the router's log"
            log.exception("cannot load the model that the nodes registered")
            return
        if info.tokenizer not in (model.tokenizer_digest, ""):
            self._problem = f"tokenizer.json in {info.path} on this machine differs from that of the nodes"
            log.error("cannot use the model that the nodes registered: %s", self._problem)
            return
        self._loaded_path = info.path
        self._adopt(model, info, max_len)
        log.info("serving %s from %s", info.name, info.path)

    def _adopt(self, model: ServedModel, info: ModelInfo, max_len: int) -> None:
        name = self._served_names[0] if self._served_names else info.name
        self._serve(
            replace(
                model,
                name=name,
                max_model_len=max_len,
                vocab_size=info.vocab_size,
                task=info.task,
                base=info.name,
                hidden_size=info.hidden_size,
            )
        )

    def _serve(self, model: ServedModel) -> None:
        self._model = model
        self._by_name = {name: replace(model, name=name) for name in self._served_names or [model.name]}
