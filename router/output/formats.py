"""The known formats by name, and how they are chosen for a model. Pure.

The names are vLLM's, so that its options keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from common.base.errors import ConfigError
from router.output import deepseek, harmony, hermes, kimi, llama_json, mistral, pythonic
from router.output.base import OutputParser, ParsedDelta, Part, Text
from router.output.marked_list import APERTUS, COHERE, GRANITE, HUNYUAN, NEMOTRON, PHI4_MINI, ListMarkers, read_marked
from router.output.reader import Steps, TextReader
from router.output.reasoning import ReasoningTags, reasoning
from router.output.tagged import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, Tags, read_tagged
from router.output.writer import Format, FormatParser, Functions, OutputWriter, call_id

_GPT_OSS = "openai_gptoss"
"""The name of gpt-oss's reasoning, which the format of its tool calls includes."""
_DEEPSEEK_MARKERS = (deepseek.BEGIN, deepseek.END, deepseek.CALL_BEGIN, deepseek.SEPARATOR, deepseek.CALL_END)


class ToolFormat(NamedTuple):
    """How a model writes tool calls. `markers`: the special tokens that its parser must see."""

    name: str
    markers: tuple[str, ...]
    read: Callable[[Functions], Format]
    """The format for a request with these functions."""
    make_id: Callable[[], str] = call_id


def _always(read: Format) -> Callable[[Functions], Format]:
    """The same format for all functions."""
    return lambda functions: read


def _for_functions(
    read: Callable[[Functions, TextReader, OutputWriter], Steps[None]],
) -> Callable[[Functions], Format]:
    """The format for a request with functions, which `read` needs."""
    return lambda functions: partial(read, functions)


def _tagged(name: str, tags: Tags) -> ToolFormat:
    markers = (tags.start, tags.end, tags.before_key, *tags.after_key, tags.after_value)
    return ToolFormat(name, markers, _for_functions(partial(read_tagged, tags)))


def _list(name: str, markers: ListMarkers) -> ToolFormat:
    return ToolFormat(name, (*markers.starts, *markers.ends), _always(partial(read_marked, markers)))


_PYTHONIC = _for_functions(pythonic.read_pythonic)
_HARMONY = ToolFormat("openai", harmony.MARKERS, _for_functions(harmony.read_harmony))
"""The format that also separates reasoning from content."""
HERMES = ToolFormat("hermes", (hermes.START, hermes.END), _always(hermes.read_hermes))
"""The format of models whose template says nothing of calls."""
TOOL_FORMATS = {
    each.name: each
    for each in (
        HERMES,
        _tagged("qwen3_coder", QWEN3_CODER),
        _tagged("qwen3_xml", QWEN3_CODER),
        _tagged("glm45", GLM45),
        _tagged("glm47", GLM45),
        _tagged("seed_oss", SEED_OSS),
        _tagged("minimax_m2", MINIMAX_M2),
        ToolFormat("llama3_json", (llama_json.TAG,), _for_functions(llama_json.read_llama_json)),
        ToolFormat("pythonic", (), _PYTHONIC),
        ToolFormat("llama4_pythonic", (pythonic.START, pythonic.END), _PYTHONIC),
        ToolFormat("olmo3", (pythonic.OLMO3_START, pythonic.OLMO3_END), _for_functions(pythonic.read_olmo3)),
        ToolFormat(
            "mistral",
            (mistral.START, mistral.ARGS, mistral.CALL_ID),
            _always(mistral.read_mistral),
            mistral.mistral_call_id,
        ),
        ToolFormat("deepseek_v3", _DEEPSEEK_MARKERS, _always(deepseek.read_deepseek)),
        ToolFormat("deepseek_v31", _DEEPSEEK_MARKERS, _always(deepseek.read_deepseek)),
        ToolFormat("kimi_k2", kimi.MARKERS, _always(kimi.read_kimi)),
        _list("granite", GRANITE),
        _list("phi4_mini_json", PHI4_MINI),
        _list("hunyuan_a13b", HUNYUAN),
        _list("nemotron_json", NEMOTRON),
        _list("cohere_command3", COHERE),
        _list("apertus", APERTUS),
        _HARMONY,
    )
}
"""All formats by name."""
_THINK = ReasoningTags("<think>", "</think>")
_REASONING_FORMATS = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK._replace(always=True),
    "deepseek_v3": _THINK,
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "cohere_command3": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
}


class _ReasoningThenTools:
    """Parses reasoning first, and tool calls in the content behind it."""

    def __init__(self, first: OutputParser, then: OutputParser) -> None:
        self._first = first
        self._then = then

    def push(self, text: str) -> ParsedDelta:
        return ParsedDelta(self._parts(self._first.push(text)))

    def finish(self) -> ParsedDelta:
        return ParsedDelta([*self._parts(self._first.finish()), *self._then.finish().parts])

    def _parts(self, delta: ParsedDelta) -> list[Part]:
        reasoning = [part for part in delta.parts if isinstance(part, Text) and part.reasoning]
        return [*reasoning, *self._then.push(delta.content).parts]


class WithoutReasoning:
    """Drops the reasoning."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def push(self, text: str) -> ParsedDelta:
        return self._shown(self._inner.push(text))

    def finish(self) -> ParsedDelta:
        return self._shown(self._inner.finish())

    def _shown(self, delta: ParsedDelta) -> ParsedDelta:
        return ParsedDelta([part for part in delta.parts if not (isinstance(part, Text) and part.reasoning)])


class OutputFormats(NamedTuple):
    """How a model's answers are parsed."""

    tools: ToolFormat | None = None
    """None: tools are not offered to the model."""
    reasoning: ReasoningTags | None = None
    assumed: bool = False
    """The format of calls is the usual one, because nothing says which one the model writes."""

    @property
    def separate_reasoning(self) -> bool:
        """Whether reasoning is separated from content."""
        return self.reasoning is not None or self.tools is _HARMONY

    @property
    def names(self) -> tuple[str, str]:
        """What separates tool calls and reasoning from content, for the log."""
        tools = "none" if self.tools is None else f"{self.tools.name} (assumed)" if self.assumed else self.tools.name
        if self.reasoning is None:
            return tools, tools if self.tools is _HARMONY else "none"
        return tools, self.reasoning.open

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the parsers must see."""
        tags = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        return tags + (() if self.tools is None else self.tools.markers)

    def parser(
        self,
        prompt: str,
        functions: Functions,
        *,
        single_call: bool = False,
        with_reasoning: bool = True,
        make_id: Callable[[], str] | None = None,
    ) -> Callable[[], OutputParser] | None:
        """Makes the parser of one answer; None if all of its text is content.

        `prompt`: the rendered text, or that of `ReasoningTags.prompt_before`. `functions`: those the model may call.
        `single_call`: further calls are dropped. `with_reasoning`: false drops it.
        """
        new_parser = self._parser(prompt, functions, single_call=single_call, make_id=make_id)
        return new_parser if with_reasoning or new_parser is None else lambda: WithoutReasoning(new_parser())

    def _parser(
        self, prompt: str, functions: Functions, *, single_call: bool, make_id: Callable[[], str] | None
    ) -> Callable[[], OutputParser] | None:
        if self.tools is None or not (functions or self.tools is _HARMONY):
            return None if self.reasoning is None else lambda: self._reasoning_parser(prompt)
        read, new_id = self.tools.read(functions), make_id or self.tools.make_id
        new_tools = lambda: FormatParser(read, new_id, single_call=single_call)  # noqa: E731
        if self.reasoning is None:
            return new_tools
        return lambda: _ReasoningThenTools(self._reasoning_parser(prompt), new_tools())

    def _reasoning_parser(self, prompt: str) -> OutputParser:
        tags = self.reasoning
        assert tags is not None
        return FormatParser(reasoning(tags, opened=tags.opened_by(prompt), begun=prompt == tags.open))


def choose_formats(
    template: str,
    has_token: Callable[[str], bool],
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> OutputFormats:
    """The formats of a model with this chat template and tokenizer. The last two are the operator's choices, or "none".

    Raises: ConfigError for an unknown name, or names that do not go together.
    """
    check_names(tool_call_parser, reasoning_parser)
    name = tool_call_parser or _tool_format(template, has_token)
    tools = TOOL_FORMATS.get(name) if name is not None else HERMES
    if tools is _HARMONY and reasoning_parser in (None, _GPT_OSS):
        return OutputFormats(tools)
    if reasoning_parser == _GPT_OSS:
        raise ConfigError(f"--reasoning-parser {_GPT_OSS} needs --tool-call-parser {_HARMONY.name}")
    tags = _REASONING_FORMATS.get(reasoning_parser or _reasoning_format(template))
    return OutputFormats(tools, tags, assumed=name is None)


def check_names(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises: ConfigError for an unknown name."""
    for option, name, known in (
        ("--tool-call-parser", tool_call_parser, [*TOOL_FORMATS, "none"]),
        ("--reasoning-parser", reasoning_parser, [*_REASONING_FORMATS, _GPT_OSS, "none"]),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"{option} {name} is unknown; known are {', '.join(known)}")


_FORMAT_BY_TEXT = (
    (harmony.CHANNEL, "openai"),
    (kimi.BEGIN, "kimi_k2"),
    ("<|im_system|>tool_declare", "kimi_k2"),
    (mistral.START, "mistral"),
    (SEED_OSS.start, "seed_oss"),
    (MINIMAX_M2.start, "minimax_m2"),
    (GLM45.before_key, "glm45"),
    (QWEN3_CODER.before_key, "qwen3_coder"),
    (QWEN3_CODER.before_name, None),
    (HUNYUAN.starts[0], "hunyuan_a13b"),
    (NEMOTRON.starts[0], "nemotron_json"),
    (COHERE.starts[0], "cohere_command3"),
    (APERTUS.starts[0], "apertus"),
    (pythonic.OLMO3_START, "olmo3"),
    ("<|tool|>", "phi4_mini_json"),
    (PHI4_MINI.ends[0], "phi4_mini_json"),
    (GRANITE.starts[0], "granite"),
    (hermes.START, "hermes"),
)
"""Texts of chat templates that only those of one format have; the first that a template has decides."""


def _tool_format(template: str, has_token: Callable[[str], bool]) -> str | None:
    """The name of the format; None: the template has none that is known."""
    if deepseek.BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    for text, name in _FORMAT_BY_TEXT:
        if text in template:
            return name
    if "[func_name1(" in template:
        return "llama4_pythonic" if has_token(pythonic.START) else "pythonic"
    if '"parameters"' in template and (llama_json.TAG in template or "ipython" in template):
        return "llama3_json"
    return None


def _reasoning_format(template: str) -> str:
    return next((name for name, tags in _REASONING_FORMATS.items() if tags.close in template), "none")
