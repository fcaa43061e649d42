"""Response shapes of `/v1/completions`. Pure; the per-chunk functions are on the router's hot path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from router.http.format import FormatOptions
from router.http.json_body import Json
from router.http.openai.base_format import BaseFormat, all_ids, reasons, usage
from router.http.openai.logprobs import TextLogprobs
from router.requests.generation import Generation
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer


class CompletionFormat(BaseFormat):
    """`num_choices`: one for each prompt."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer, num_choices: int) -> None:
        super().__init__(options, tokenizer, "text_completion")
        count = num_choices if options.with_logprobs else 0
        self._logprobs = [
            TextLogprobs(
                tokenizer, skip_special_tokens=options.skip_special_tokens, tokens_as_ids=options.tokens_as_ids
            )
            for _ in range(count)
        ]
        self._single = num_choices == 1

    def opening(self, generation: Generation, index: int) -> Iterator[Json]:
        options, logprobs = self.options, iter(self.echoed_logprobs(generation, index))
        if not (options.with_token_ids or options.echo):
            return
        chunk = self.chunk(self._choice(index, generation.request.echo))
        if options.with_token_ids:
            ids = generation.request.engine.prompt_ids.tolist()
            chunk["choices"][0] |= {"prompt_token_ids": ids, "token_ids": []}
            if self._single:
                chunk["prompt_token_ids"] = ids
        chunk["choices"][0]["logprobs"] = next(logprobs, None)
        yield chunk
        for portion in logprobs:
            yield self.chunk({**self._choice(index, ""), "logprobs": portion})

    def echoed_logprobs(self, generation: Generation, index: int) -> Iterable[Json]:
        request = generation.request
        if not self.options.with_logprobs:
            return ()
        if not self.options.echo:
            self._logprobs[index].begin_text(request.engine.prompt_ids)
            return ()
        return self._logprobs[index].render_prompt(request.engine.prompt_ids, generation.prompt_logprobs, request.echo)

    def delta(self, delta: Delta, index: int) -> list[Json]:
        choice = self._shown(delta, index)
        return [] if choice is None else [self.chunk(choice)]

    def closing(self, generation: Generation, index: int, last: Delta) -> list[Json]:
        return [self.closing_chunk(self._shown(last, index) or self._choice(index, ""), generation)]

    def _shown(self, delta: Delta, index: int) -> Json | None:
        """The choice of a chunk; None if there is nothing to show."""
        options = self.options
        if not (delta.text or options.with_token_ids or options.with_logprobs):
            return None
        choice = self._choice(index, delta.text)
        if options.with_logprobs:
            choice["logprobs"] = self.logprobs([delta], index)
        if options.with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def logprobs(self, deltas: Sequence[Delta], index: int) -> Json:
        logprobs = [found for delta in deltas for found in delta.logprobs or []]
        return self._logprobs[index].render(all_ids(deltas), logprobs)

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        choices: list[Json] = []
        for index, (generation, parts) in enumerate(zip(generations, deltas, strict=True)):
            choice: Json = {
                "index": index,
                "text": generation.request.echo + "".join(part.text for part in parts),
                "logprobs": None,
                **reasons(generation.outcome),
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
            if self.options.with_token_ids:
                choice |= {
                    "prompt_token_ids": generation.request.engine.prompt_ids.tolist(),
                    "token_ids": all_ids(parts),
                }
            choices.append(choice)
        body: Json = {**self._head, "choices": choices, "usage": usage(generations, self.options.samples)}
        if self.options.with_token_ids and self._single:
            body["prompt_token_ids"] = generations[0].request.engine.prompt_ids.tolist()
        return body

    @staticmethod
    def _choice(index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
