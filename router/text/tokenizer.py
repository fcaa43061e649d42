"""Text to token ids: tokenizer.json through the `tokenizers` library, and the model's chat template.

Router process. Loading reads files and can take seconds for a large vocabulary: call it on a thread, not on the event
loop. `encode` releases the GIL, so long texts may be encoded on a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLTokenizer
from tokenizers import Tokenizer as RawTokenizer

from common.base.errors import BadRequest, ConfigError, as_config_error
from common.engine.grammar.compile import checking_tokenizer, is_special, without_space
from common.model.added_tokens import complete, named_tokens, read_if_there, special_tokens
from router.text.chat_template import ChatTemplate
from router.text.conversation_fit import ROLES, FittedMessages
from router.text.detokenizer import TokenPieces
from router.text.pair_layout import SAMPLE, PairIds, PairLayout
from router.text.template_files import DEFAULT, TOOL_USE, read_templates
from router.text.text_cuts import PIECE_CHARS, TextCuts, groups_of
from router.text.tool_fit import FittedTools, WriteCalls
from router.text.typed_tokens import SEPARATOR, TypedTokens

_FIM_TOKENS = (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("▁<PRE>", "▁<SUF>", "▁<MID>"))
"""Fill-in-the-middle tokens of Qwen and others, and of CodeLlama."""


class Part(NamedTuple):
    """The part of a text's tokens that is needed."""

    limit: int | None = None
    """At most this many tokens; None: all."""
    from_end: bool = False
    """They are the last ones."""


WHOLE = Part()


class FimIds(NamedTuple):
    """The tokens that precede the text before the gap, the text after it, and the text that fills it."""

    prefix: int
    suffix: int
    middle: int


def _fitted(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts after the longer one was cut so that both fit; like `longest_first` of the tokenizers library."""
    if first + second <= room:
        return first, second
    if first > second:
        second = min(second, room // 2)
        return room - second, second
    first = min(first, room // 2)
    return first, room - first


class Tokenizer:
    """The tokenizer and chat template of one model folder. Immutable after construction, safe on any thread.

    Raises: ConfigError with one sentence when files are missing or broken.
    """

    def __init__(self, folder: Path, *, chat_template: str | None = None, fits_conversations: bool = True) -> None:
        """`chat_template`: a file to use instead of the model's own. `fits_conversations`: `fit_chat` and `fit_tools` may
        change messages."""
        self._fits_conversations = fits_conversations
        file = self._file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"no tokenizer.json in {folder}; the router needs a fast tokenizer file there")
        with as_config_error(f"cannot load {file}"):
            self._raw = RawTokenizer.from_file(str(file))
            self._raw.encode("")  # fails where the post-processor names tokens that there are not
        self._raw.no_truncation()
        self._raw.no_padding()
        config = read_if_there(folder / "tokenizer_config.json")
        special = special_tokens(folder, config)
        complete(self._raw, folder, config, special)
        sources, named = read_templates(folder, config, chat_template), named_tokens(folder, config)
        templates = {name: ChatTemplate(source, named) for name, source in sources.items()}
        self._template = templates.get(DEFAULT)
        self._tool_template = templates.get(TOOL_USE, self._template)
        self.pieces = TokenPieces(self._raw)
        self._typed_tokens = TypedTokens(
            token for token_id in self.pieces.special_ids if (token := self._raw.id_to_token(token_id))
        )
        added = self._raw.get_added_tokens_decoder()
        self._grammar_ids = {token.content: token_id for token_id, token in added.items() if is_special(token)}
        self.eos_token_id: int | None = self._raw.token_to_id(special["eos_token"]) if "eos_token" in special else None

        self.fim_ids = self._find_fim_ids()
        """None: the model cannot fill in the middle."""
        vocab = self._raw.get_vocab(with_added_tokens=True)
        strips = any(each.lstrip or each.rstrip for each in added.values())
        self._longest_token = 0 if strips else max(map(len, vocab), default=0)
        """Most characters of a token; 0: unlimited, because a token may cover any number of spaces beside it."""

    def for_grammars(self, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
        """The same tokens for checking grammars. Raises: ConfigError if llguidance cannot use them."""

        def encode(text: str) -> list[int]:
            return self.encode_chat(self._typed_tokens.separated(text))

        return checking_tokenizer(self._file, self._raw, encode, vocab_size, eos_ids)

    def _find_fim_ids(self) -> FimIds | None:
        for tokens in _FIM_TOKENS:
            ids = [token_id for token in tokens if (token_id := self._raw.token_to_id(token)) is not None]
            if len(ids) == len(tokens):
                return FimIds(*ids)
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True, part: Part = WHOLE) -> list[int]:
        """Token ids of a plain text, including special tokens such as bos where the model expects them. `part`: what is needed;
        tokens of a long text outside of it may be missing.
        """
        return self._encode_texts([text], add_special_tokens, part)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, part: Part = WHOLE
    ) -> list[list[int]]:
        """Token ids of several plain texts, each encoded as by `encode`."""
        found: list[list[int]] = []
        for group in groups_of(texts):
            if len(group) == 1:
                found.append(self._encode_texts(group, add_special_tokens, part))
            else:
                encoded = self._raw.encode_batch_fast(list(group), add_special_tokens=add_special_tokens)
                found += [each.ids for each in encoded]
        return found

    def _encode_texts(self, texts: Sequence[str], add_special_tokens: bool, part: Part) -> list[int]:
        """Token ids of texts that are the parts of one. Long ones are encoded in pieces."""
        if len(texts) == 1 and len(texts[0]) <= PIECE_CHARS:
            return self._encode_piece(texts[0], add_special_tokens=add_special_tokens)
        pieces = [
            piece for text in texts for piece in (self._cuts.pieces(text) if len(text) > PIECE_CHARS else (text,))
        ]
        numbers = range(len(pieces))
        ids: list[int] = []
        for number in reversed(numbers) if part.from_end else numbers:
            found = (self._encode_within if number else self._encode_piece)(pieces[number])
            ids += [self._ids[each] for each in (reversed(found) if part.from_end else found)]
            if part.limit is not None and len(ids) > part.limit:
                break
        if part.from_end:
            ids.reverse()
        if not add_special_tokens:
            return ids
        around, before = self._encode_piece("", add_special_tokens=True), self._special_around[0]
        return [*around[:before], *ids, *around[before:]]

    def _encode_piece(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # The "fast" variant does not compute each token's offset in the text.
        return self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @cached_property
    def _cuts(self) -> TextCuts:
        added = list(self._raw.get_added_tokens_decoder().values())
        return TextCuts(self._raw.get_vocab(with_added_tokens=True), added, self._encode_piece, self._encode_within)

    @cached_property
    def _ids(self) -> list[int]:
        """All token ids: a list of these takes a quarter of the memory of a list of new numbers."""
        return list(range(max(self._raw.get_vocab(with_added_tokens=True).values()) + 1))

    def cut(self, ids: list[int], limit: int, *, keep_last: bool = False) -> list[int]:
        """Cut the token ids of a text to at most `limit`. The special tokens that `encode` put around it stay, and its first
        (or last) tokens.
        """
        before, after = self._special_around
        end = len(ids) - after
        room = max(0, limit - before - after)
        kept = ids[max(before, end - room) : end] if keep_last else ids[before : min(end, before + room)]
        return [*ids[:before], *kept, *ids[end:]][:limit]

    @cached_property
    def _special_around(self) -> tuple[int, int]:
        """How many special tokens the model expects before and after a text."""
        (sample,) = self._raw.encode_batch_fast([SAMPLE], add_special_tokens=False)
        sample.truncate(1)
        mask = self._raw.post_process(sample).special_tokens_mask
        return mask.index(0), len(mask) - mask.index(0) - 1

    def encode_pairs(
        self, first: str, seconds: Sequence[str], *, limit: int | None = None, second_limit: int | None = None
    ) -> Iterator[PairIds]:
        """The pair of `first` with each of `seconds`, with the special tokens that the model expects.

        `limit`: most tokens of a pair; the longer text is cut at its end. `second_limit`: most tokens of a second text.
        """
        layout = self._pair_layout
        head = self.encode(first, add_special_tokens=False)
        room = None if limit is None else max(0, limit - layout.num_special)
        for tail in self.encode_batch(seconds, add_special_tokens=False):
            tail = tail[:second_limit]
            lengths = (len(head), len(tail)) if room is None else _fitted(len(head), len(tail), room)
            yield layout.join(head[: lengths[0]], tail[: lengths[1]])

    @cached_property
    def _pair_layout(self) -> PairLayout:
        return PairLayout(self._raw)

    def min_tokens(self, text: str) -> int:
        """A lower bound of the text's length in tokens, without encoding it: rejects cheaply what cannot fit."""
        if self.pieces.kind == "text":
            return 0  # such a tokenizer may map any unknown word to one token
        return len(text) // self._longest_token if self._longest_token else 0

    def check_pairs(self) -> None:
        """Raises: ConfigError if pairs of texts cannot be encoded."""
        with as_config_error(f"cannot load {self._file}"):
            _ = self._pair_layout

    def check_template(self) -> None:
        """Raises: ConfigError if there is a chat template that refuses a single message of a user."""
        if self._template is not None:
            try:
                self._template.render([{"role": "user", "content": "Hello"}])
            except BadRequest as error:
                reason = error.message.partition(": ")[2]
                raise ConfigError(f"the chat template refuses a single message of a user ({reason})") from error

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises: ConfigError if the chat template writes a token that the model, which has ids below `vocab_size`, does not have."""
        if self._template is None:
            return
        sources = {template.source for template in (self._template, self._tool_template) if template is not None}
        added = self._raw.get_added_tokens_decoder()
        beyond = {id_: token.content for id_, token in added.items() if id_ >= vocab_size}
        written = [id_ for id_, text in beyond.items() if any(text in source for source in sources)]
        if beyond and not written:  # by a variable, such as bos_token
            ids = self.encode_chat(self._template.render([{"role": "user", "content": "Hello"}]))
            written = [id_ for id_ in ids if id_ in beyond]
        if written:
            raise ConfigError(
                f"the chat template writes {beyond[written[0]]!r}, which is token {written[0]}, and the model has only {vocab_size}: "
                "its tokenizer or its template is of another model; --chat-template can name another template"
            )

    @property
    def template_source(self) -> str:
        """The source of the chat template for requests with tools; empty if there is none."""
        return "" if self._tool_template is None else self._tool_template.source

    @property
    def takes_tools(self) -> bool:
        """Whether tools can be shown to the model: by its chat template, or described in the system message."""
        return self._tool_template is not None and (self._fits_conversations or self.shows_tools)

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self._tool_template is not None and self._tool_template.tool_use.shows_tools

    def fit_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], write: WriteCalls
    ) -> FittedTools:
        """The messages and tools for `fit_chat` and `render_chat`, changed where the chat template does not show them."""
        template = self._tool_template if tools else self._template
        if template is None or not self._fits_conversations:
            return FittedTools(messages, tools)
        return template.tool_use.fit(messages, tools, write)

    def token_id(self, token: str) -> int | None:
        """The id of `token`; None if it is no single token."""
        return self._raw.token_to_id(token)

    def special_id(self, token: str) -> int | None:
        """The id of `token`; None if it is no special token."""
        token_id = self._raw.token_to_id(token)
        return token_id if token_id in self.pieces.special_ids else None

    def grammar_id(self, token: str) -> int | None:
        """The id by which grammars must name `token`; None if they write it as text."""
        return self._grammar_ids.get(token)

    def fit_chat(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool = False) -> FittedMessages:
        """The messages for `render_chat`, changed where the chat template does not take their sequence of roles.

        Raises: BadRequest for a role that is none of OpenAI's, and that the template does not show.
        """
        template = self._tool_template if with_tools else self._template
        for role in {str(message.get("role")) for message in messages} - ROLES:
            if template is not None and not template.conversations.takes_role(role):
                raise BadRequest(f"the chat template has no role {role!r}", param="messages")
        if template is None or not self._fits_conversations:
            return FittedMessages(messages)
        return template.conversations.fit(messages)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        effort: str | None = None,
    ) -> str:
        """The prompt text of a conversation, for `encode_chat`. Special tokens that the client typed have separators.
        `effort`: of reasoning; `kwargs` go before what it sets.

        Raises: BadRequest when there is no template, it rejects the messages, or does not know of efforts.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions, or start the router with --chat-template FILE",
                param="messages",
            )
        separated = self._typed_tokens.separated
        if effort is not None:
            kwargs = {**template.effort(effort), **(kwargs or {})}
        return template.render(
            [separated(message) for message in messages],
            tools=[separated(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs and separated(kwargs),
        )

    def encode_chat(self, rendered: str, *, add_special_tokens: bool = False, part: Part = WHOLE) -> list[int]:
        """Token ids of a rendered conversation, which contains its special tokens. `part`: as in `encode`."""
        return self._encode_texts(rendered.split(SEPARATOR), add_special_tokens, part)

    def encode_within(self, text: str) -> list[int]:
        """Token ids of a text in the middle of another one, before which sentencepiece's kind must put no space."""
        encode = partial(self.encode, add_special_tokens=False)
        return (without_space(encode) if self.pieces.kind == "fallback" else encode)(text)

    def _encode_within(self, piece: str) -> list[int]:
        encode = self._encode_piece
        return (without_space(encode) if self.pieces.kind == "fallback" else encode)(piece)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of these ids."""
        return self._raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_str(self, token_id: int) -> str:
        """A token as the vocabulary spells it; empty for an id that the tokenizer does not know."""
        return self._raw.id_to_token(token_id) or ""

    def text_of(self, token_id: int) -> str:
        """How one token is shown in log-probabilities."""
        return self.pieces.piece(token_id).decode(errors="replace")
