"""Runs a beam search on the nodes: every step is one token of each beam, whose KV the nodes have from the step before.

Runs on the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from common.base.errors import BadRequest, DeadlineExceeded
from common.control.identities import pack_ids
from common.control.messages import PromptLogprobs, SamplingParams
from router.http.answer import Answer, whole_body
from router.http.format import Format
from router.models.served_model import ServedModel
from router.requests.beam_search import Beam, BeamOptions, BeamSearch
from router.requests.generation import Generation, text_of
from router.requests.request import Delta, GenerationRequest, Outcome
from router.text.detokenizer import TokenPieces

Submit = Callable[[str, list[GenerationRequest]], list[Generation]]
"""Starts generations under a request id; the answer then follows them."""


@dataclass(slots=True)
class BeamAnswer:
    """What formats show of a beam; they show the same of a `Generation`."""

    request: GenerationRequest
    outcome: Outcome
    completion_tokens: int
    cached_tokens: int
    prompt_logprobs: list[PromptLogprobs]
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)


class BeamRun:
    """The beam search of a client's request, over each of its prompts."""

    def __init__(self, options: BeamOptions, wanted: list[GenerationRequest], model: ServedModel) -> None:
        """Raises: BadRequest for what no beam can follow."""
        for each in wanted:
            if each.engine.sampling.grammar is not None:
                raise BadRequest(
                    f"{each.grammar_param} is not allowed with use_beam_search=true", param=each.grammar_param
                )
            if each.prompt_only:
                raise BadRequest("max_tokens=0 is not allowed with use_beam_search=true", param="max_tokens")
        self.first: list[Generation] = []
        """The first step's generations, one for each prompt."""
        self.used_tokens = sum(len(each.engine.prompt_ids) for each in wanted)
        """Prompt tokens, and tokens that the nodes have generated."""
        self._wanted, self._model, self._options = wanted, model, options
        self._searches = [
            BeamSearch(
                options,
                prompt_len=len(each.engine.prompt_ids),
                max_tokens=each.engine.sampling.max_tokens,
                ends=frozenset(each.engine.sampling.stop_token_ids),
            )
            for each in wanted
        ]

    async def body(
        self, form: Format, answer: Answer, request_id: str, submit: Submit, timeout_s: float
    ) -> bytes | None:
        """The body of the response; None if the client has disconnected.

        Raises: the error of a step that failed; DeadlineExceeded after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._search(answer, request_id, submit)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the beam search took longer than a request's limit of {timeout_s:g} s") from error
        if answer.abandoned:
            return None
        answers, deltas = self._answers(self._model.tokenizer.pieces)
        return await whole_body(form, cast("list[Generation]", answers), deltas)

    async def _search(self, answer: Answer, request_id: str, submit: Submit) -> None:
        """Search until all beams are found, or the client has disconnected."""
        step = 0
        while going := [pair for pair in zip(self._wanted, self._searches, strict=True) if not pair[1].is_over]:
            asked = [self._continue(request, beam) for request, search in going for beam in search.beams]
            generations = submit(f"{request_id}-step{step}" if step else request_id, asked)
            self.first = self.first or generations
            self.used_tokens += len(asked)
            deltas = await answer.finished()
            if answer.abandoned:
                return
            found = iter([logprobs for parts in deltas for delta in parts for logprobs in delta.logprobs or ()])
            for _, search in going:
                search.advance([next(found) for _ in search.beams])
            step += 1

    def _continue(self, request: GenerationRequest, beam: Beam) -> GenerationRequest:
        """The request for a beam's next token."""
        engine, sampling = request.engine, request.engine.sampling
        step = SamplingParams(
            sampling.seed,
            1,
            temperature=0.0,
            logprobs=min(self._model.vocab_size, max(self._options.num_candidates, sampling.logprobs or 0)),
            prompt_logprobs=None if beam.token_ids else sampling.prompt_logprobs,
        )
        prompt_ids = pack_ids([*engine.prompt_ids, *beam.token_ids])
        return replace(
            request, engine=engine._replace(prompt_ids=prompt_ids, sampling=step), stop=(), detokenize=False, echo=""
        )

    def _answers(self, pieces: TokenPieces) -> tuple[list[BeamAnswer], list[list[Delta]]]:
        """Each prompt's beams, the best one first, and their tokens and text."""
        answers: list[BeamAnswer] = []
        deltas: list[list[Delta]] = []
        for request, search, first in zip(self._wanted, self._searches, self.first, strict=True):
            for beam in search.best():
                outcome = Outcome("length")
                if beam.has_ended:
                    last = beam.token_ids[-1]
                    outcome = Outcome("stop", last if last in request.client_stop_ids else None)
                count = len(beam.token_ids)
                answers.append(BeamAnswer(request, outcome, count, first.cached_tokens, first.prompt_logprobs))
                deltas.append([_delta(request, beam, pieces)])
        return answers, deltas


def _delta(request: GenerationRequest, beam: Beam, pieces: TokenPieces) -> Delta:
    text, ids = text_of(request, pieces), list(beam.token_ids)
    shown = text.push(ids, ended_by_token=beam.has_ended).text + text.flush()
    count = request.engine.sampling.logprobs
    if count is None:
        return Delta(shown, ids, None)
    logprobs = [
        each._replace(top_ids=each.top_ids[:count], top_logprobs=each.top_logprobs[:count]) for each in beam.logprobs
    ]
    return Delta(shown, ids, logprobs)
