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


def reasoning(tags: ReasoningTags, *, opened: bool) -> Format:
    """The format. White space around the tags is dropped. `opened`: the text begins within the reasoning.

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
        held: list[str] = []
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
