"""From generated token ids to the text a client may see: detokenization, then stop strings. Pure.

Runs in the router process, on its event loop, once per generated token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.text.detokenizer import Detokenizer


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and buffers text that may become one.

    If several match, the one that ends first wins; among these, the one that starts first. So the result does not
    depend on where the pieces are cut.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop`: the text before the end includes the stop string."""
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """(text that can no longer belong to a stop string, the stop string found or None)."""
        if not self._stops or not delta:
            return delta, None
        text = self._held + delta
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = self._undecided_from(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The buffered text, once no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _undecided_from(self, text: str) -> int:
        """The first index at which the rest of `text` is a prefix of a stop string; the text's length if there is none."""
        first = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(text[at:]):
                    first = at
                    break
                at = text.find(stop[0], at + 1, first)
        return first


class TextDelta(NamedTuple):
    """The text of some new tokens. `consumed`: how many of them count; the others come after a stop string."""

    text: str
    consumed: int
    stop: str | None = None


class TextStream:
    """The visible text of one generation. Stop strings are searched only in the text of tokens after the first `min_tokens`."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int = 0, include_stop: bool = False
    ) -> None:
        """`include_stop`: the text includes the stop string, or the text of the stop token."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops else None
        self._include_stop = include_stop
        self._immune_tokens = min_tokens

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> TextDelta:
        """Take the next tokens. `ended_by_token`: the last of them is a stop token."""
        hidden = ended_by_token and not self._include_stop
        parts: list[str] = []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            delta = "" if hidden and index == last else self._detokenizer.push(token_id)
            if self._matcher is None or self._immune_tokens > 0:
                self._immune_tokens -= 1
                parts.append(delta)
                continue
            text, stop = self._matcher.push(delta)
            parts.append(text)
            if stop is not None:
                return TextDelta("".join(parts), index + 1, stop)
        return TextDelta("".join(parts), len(token_ids))

    def flush(self) -> str:
        """The rest of the text, if no stop string ended the generation."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        text, stop = self._matcher.push(rest)
        return text if stop is not None else text + self._matcher.flush()


class NoText:
    """Replaces a `TextStream` for a client that wants token ids only."""

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> TextDelta:
        """Take the next tokens."""
        return TextDelta("", len(token_ids))

    def flush(self) -> str:
        """Nothing."""
        return ""
