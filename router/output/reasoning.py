"""Reasoning between tags, such as `<think>...</think>`, before the answer. Pure."""

from __future__ import annotations

from typing import NamedTuple

from router.output.reader import Steps, TextReader
from router.output.writer import Format, OutputWriter


class ReasoningTags(NamedTuple):
    """`always`: the answer begins with reasoning even if neither the prompt nor the model opens it."""

    open: str
    close: str
    always: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to this prompt begins within the reasoning. Templates can open it, or close it at once.

        Only the end of the prompt counts: tags within messages mean nothing.
        """
        return prompt[-200:].rstrip().endswith(self.open) or (self.always and not self.closed_by(prompt))

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends with an end of the reasoning, so that the answer has none."""
        return prompt[-200:].rstrip().endswith(self.close)

    def prompt_before(self, prompt: str, prefill: str) -> str:
        """What counts as the prompt of an answer that continues the text `prefill`, with which `prompt` ends: only a tag, which
        says whether the answer begins within the reasoning (`open`) or behind it; the prompt itself if the text is empty
        or no more than a tag.
        """
        text = prefill.strip()
        if text in ("", self.open, self.close):
            return prompt
        opened, closed = text.rfind(self.open), text.rfind(self.close)
        if opened == closed:  # no tag: the template can have opened the reasoning before the text
            before = prompt.rstrip().removesuffix(text)
            return self.open if before.rstrip().endswith(self.open) else self.close
        return self.open if opened > closed else self.close


def reasoning(tags: ReasoningTags, *, opened: bool, begun: bool = False) -> Format:
    """The format. White space around the tags is dropped. `opened`: the text begins within the reasoning; `begun`: and behind
    the first words of it.

    Without the opening tag (unless `opened`) all text is content, without the closing one all is reasoning.
    """

    def read(reader: TextReader, writer: OutputWriter) -> Steps[None]:
        space = yield from reader.skip_space()
        if (yield from reader.accept(tags.open)):
            yield from reader.skip_space()
        elif not opened:
            writer.content(space)
            yield from reader.until((), writer.content)
            return
        held = [space] if begun else []
        """White space at the end of the reasoning."""

        def show(text: str) -> None:
            shown = text.rstrip()
            if shown:
                writer.reasoning("".join(held) + shown)
                held.clear()
            held.append(text[len(shown) :])

        if (yield from reader.until((tags.close,), show)) is not None:
            yield from reader.skip_space()
        yield from reader.until((), writer.content)

    return read
