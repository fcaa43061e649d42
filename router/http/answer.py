"""From generations to HTTP bodies: waits for new deltas, formats them, and cancels when the client disconnects.

Runs on the router's event loop, one `Answer` per client request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from common.base.errors import KvRelayError, Overloaded
from common.control.http_connection import DisconnectListener
from router.http.format import Format
from router.http.json_body import Json, large_json, to_json
from router.http.openai.base_format import usage
from router.http.openai.logprobs import portion_of
from router.http.openai.samples import most_likely
from router.http.turns import MANY_BYTES, maybe_on_thread, yield_turn
from router.requests.generation import Generation
from router.requests.request import Delta, Outcome

_PORTION = 32
"""Deltas formatted in a row before other tasks of the event loop run: there can be thousands of deltas."""


class Answer:
    """The generations of one client request, one per prompt.

    Invariant: after `close`, none of them runs.
    """

    def __init__(self, ping_s: float = 0.0, large_ones: set[object] | None = None) -> None:
        """`ping_s`: a stream that sends nothing for so long sends a ping; 0: never. `large_ones`: the router's answers that
        have taken a place."""
        self._large_ones: set[object] = set() if large_ones is None else large_ones
        self.generations: list[Generation] = []
        self._ping_s = ping_s
        self._ping_timer: asyncio.TimerHandle | None = None
        self._ping_due = False
        self._sent_s = 0.0
        """When the stream sent something last, by the loop's clock."""
        self._news = asyncio.Event()
        self._for_ends = False
        """Whether to wake up only when a generation ends."""
        self._client: DisconnectListener | None = None

    def on_news(self) -> None:
        """Generations call this when they have new deltas or an outcome."""
        if not self._for_ends or [each for each in self.generations if each.outcome is not None]:
            self._news.set()

    def follow(self, generations: list[Generation], client: DisconnectListener) -> None:
        """Wait for these generations, and cancel them as soon as the client disconnects."""
        self.generations, self._client = generations, client
        client.watch(self._cancel)

    def take_place(self, most: int) -> None:
        """Become one of the `most` large answers in work. Raises: Overloaded."""
        if len(self._large_ones) >= most:
            raise Overloaded(
                f"{most} answers with log-probabilities of the whole vocabulary are in work; try again shortly"
            )
        self._large_ones.add(self)

    def _cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()

    def close(self) -> None:
        """Stop what still runs and drop the references. They form cycles, and the garbage collector rarely examines objects
        older than some seconds.
        """
        self._large_ones.discard(self)
        if self._client is not None:
            self._client.watch(None)
            self._client = None
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None
        self._cancel()
        for generation in self.generations:
            if generation.outcome is not None and generation.outcome.error is not None:
                generation.outcome.error.__traceback__ = None  # its frames refer to the generation
        self.generations = []

    async def begun(self) -> None:
        """Wait until there is something to send: the first tokens, or a ping.

        Raises: the error of a generation that failed before.
        """
        if self._ping_s:
            self._sent_s = asyncio.get_running_loop().time()
            self._check_pause()
        await self._news.wait()
        self._raise_failure()

    def _check_pause(self) -> None:
        """Wake the stream up if it has sent nothing for `ping_s`. One timer per stream, which tokens do not touch."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._sent_s >= self._ping_s:
            self._sent_s, self._ping_due = now, True
            self._news.set()
        self._ping_timer = loop.call_at(self._sent_s + self._ping_s, self._check_pause)

    async def finished(self) -> list[list[Delta]]:
        """Wait for the end; every generation's deltas. Raises: the error of the first generation that failed."""
        self._for_ends = True
        while [each for each in self.generations if each.outcome is None]:
            self._news.clear()
            await self._news.wait()
            self._raise_failure()
        self._raise_failure()
        return [generation.take() for generation in self.generations]

    @property
    def abandoned(self) -> bool:
        """Whether the client disconnected."""
        return Outcome() in [generation.outcome for generation in self.generations]

    def _raise_failure(self) -> None:
        for generation in self.generations:
            if generation.outcome is not None and generation.outcome.error is not None:
                raise generation.outcome.error

    def failed_generation(self, error: KvRelayError) -> Generation | None:
        """The generation that failed with this error, else the first one; None before there is any."""
        failed = (each for each in self.generations if each.outcome is not None and each.outcome.error is error)
        return next(failed, self.generations[0] if self.generations else None)

    async def events(self, form: Format) -> AsyncIterator[tuple[bytes, bool]]:
        """The parts of the stream's body, each with whether more follows. Text that arrived together is one write, even if
        it has many events."""
        opened: set[int] = set()
        open_choices = dict(enumerate(self.generations))
        sent = 0
        """Tokens in the chunks so far."""
        size, portion = (MANY_BYTES, 1) if form.options.whole_vocabulary else (0, _PORTION)

        def framed(make: Callable[..., list[Json]], *args: Any) -> list[bytes]:
            chunks = make(*args)
            if form.options.continuous_usage:
                for chunk in chunks:
                    chunk["usage"] = usage(self.generations, form.options.samples, sent)
            return [form.frame(chunk) for chunk in chunks]

        while open_choices:
            await self._news.wait()
            self._news.clear()
            parts: list[bytes] = []
            for index, generation in list(open_choices.items()):
                deltas, outcome = generation.take(), generation.outcome
                if (deltas or outcome is not None) and index not in opened:
                    opened.add(index)
                    opening = iter(form.opening(generation, index))
                    while chunks := await maybe_on_thread(size, partial(framed, _next, opening)):
                        parts += chunks
                        if len(parts) >= portion:
                            yield b"".join(parts), True
                            parts.clear()
                            await yield_turn()
                ended = outcome is not None and outcome.finish_reason is not None
                last = _last(deltas) if ended else None
                if form.text_only:
                    parts += [form.text_event(delta.text, index) for delta in deltas if delta.text]
                    deltas = ()
                for delta in deltas:
                    sent += len(delta.token_ids)
                    parts += await maybe_on_thread(size, partial(framed, form.delta, delta, index))
                    if len(parts) >= portion:
                        yield b"".join(parts), True
                        parts.clear()
                        await yield_turn()
                if outcome is None:
                    continue
                if outcome.error is not None:
                    parts += [form.frame(form.failure(outcome.error, generation)), form.done]
                    yield b"".join(parts), False
                    return
                if last is None:
                    yield b"", False
                    return
                del open_choices[index]
                sent += len(last.token_ids)
                parts += await maybe_on_thread(size, partial(framed, form.closing, generation, index, last))
            if not open_choices:
                parts += [form.frame(chunk) for chunk in form.ending(self.generations)]
                parts.append(form.done)
            if parts := self._or_ping(parts, form):
                yield b"".join(parts), bool(open_choices)

    def _or_ping(self, parts: list[bytes], form: Format) -> list[bytes]:
        """What is sent now: `parts`, or a ping if there are none and one is due."""
        if parts:
            self._sent_s = asyncio.get_running_loop().time()
        elif self._ping_due:
            parts = [form.ping()]
        self._ping_due = False
        return parts


async def whole_body(form: Format, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> bytes:
    """The body of a response that is not streamed."""
    options, computed = form.options, generations
    if options.returned < options.samples:
        kept = most_likely(deltas, options.samples, options.returned)
        generations, deltas = [generations[index] for index in kept], [deltas[index] for index in kept]
    size = sum(len(delta.text) for parts in deltas for delta in parts)
    shown = await maybe_on_thread(size, partial(form.whole, generations, deltas))
    if options.returned < options.samples:
        shown["usage"] = usage(computed, options.samples)
    body, size = to_json(shown), MANY_BYTES if options.whole_vocabulary else 0
    if options.with_logprobs:
        pieces = [_logprobs(form, generations[index], parts, index) for index, parts in enumerate(deltas)]
        body = await _fill(body, b'"logprobs":', pieces, size)
    if options.with_prompt_logprobs:
        pieces = [({"": part} for part in form.prompt_logprobs(each)) for each in generations]
        body = await _fill(body, b'"prompt_logprobs":', pieces, size)
    return body


def _logprobs(form: Format, generation: Generation, deltas: list[Delta], index: int) -> Iterator[Json]:
    """A choice's log-probabilities in portions."""
    yield from form.echoed_logprobs(generation, index)
    portion = portion_of(deltas[0].logprobs or () if deltas else (), _PORTION)
    for start in range(0, max(1, len(deltas)), portion):
        yield form.logprobs(deltas[start : start + portion], index)


def _next(values: Iterator[Json]) -> list[Json]:
    """The next value, or none."""
    return list(islice(values, 1))


async def _fill(body: bytes, name: bytes, values: Sequence[Iterable[Json]], size: int) -> bytes:
    """Replace each null of this name by its value, which comes in portions whose lists are joined. `size`: bytes of a portion.

    Generated text cannot contain the name, because its quotes are escaped.
    """
    first, *others = body.split(name + b"null")
    parts = [first]
    for portions, after in zip(values, others, strict=False):
        fields: dict[str, list[bytes]] = {}
        left = iter(portions)
        while portion := await maybe_on_thread(size, partial(_serialized, left, large_json if size else to_json)):
            for field, value in portion.items():
                fields.setdefault(field, []).append(value)
            await yield_turn()
        filled = b",".join(to_json(field) + b":" + _joined(found) for field, found in fields.items())
        parts += [name, _joined(fields[""]) if "" in fields else b"{%b}" % filled, after]
    return b"".join(parts)


def _serialized(portions: Iterator[Json], serialize: Callable[[object], bytes]) -> dict[str, bytes]:
    """The fields of the next portion; none at the end."""
    return {field: serialize(value) for portion in _next(portions) for field, value in portion.items()}


def _last(deltas: list[Delta]) -> Delta:
    """Take the new tokens that came with the end: the last ones, and text that waited for them."""
    rest = deltas.pop() if deltas else Delta("", [], None)
    if rest.token_ids or not deltas:
        return rest
    tokens = deltas.pop()
    return Delta(tokens.text + rest.text, tokens.token_ids, tokens.logprobs)


def _joined(lists: list[bytes]) -> bytes:
    """Several JSON lists joined into one; a value that is not a list is the same in all."""
    if not lists[0].startswith(b"["):
        return lists[0]
    return b"[%b]" % b",".join(each[1:-1] for each in lists if each != b"[]")
