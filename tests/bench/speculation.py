"""What guessing tokens gains: real steps of a model without trained weights, whose answers are prescribed.

An answer repeats the prompt, a text of 200 lines, with one line in ten changed; or it repeats nothing. Every token is drawn from the
model's logits as usual, then replaced by the prescribed one, so that steps cost what they cost and drafts are right as often
as the text has it.
"""

from __future__ import annotations

import contextlib
import random
import time
from itertools import count
from typing import Any

from bench.draft_training import draft_folder
from bench.results import Result, Target, median
from bench.session import Session
from bench.shape import SHAPES, make_model_folder
from bench.worker import PASSIVE, Worker

from common.base.device import configure_torch
from common.base.hashing import root_hash
from common.config.service_configs import DecodeConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.drafting import IndexProposer
from common.engine.sampling.host_sampler import HostSampler, HostSamplerOutput
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.engine.speculation.acceptance import Acceptance
from common.engine.speculation.sequence_drafts import SequenceDrafts
from common.engine.step import SampledToken, SampleSpec
from common.node.parts import make_pool, make_scheduler
from common.node.worker import load_worker
from common.parallel.mesh import SOLO
from decode_node.role import ROLE

_LINES, _LINE = 200, 6
_VOCAB = 4000


class Speculating:
    """One model, driven by the scheduler of a decode node with guesses and by that of one without."""

    def __init__(self, folder: str) -> None:
        configure_torch(None)
        plans = {
            method: ROLE.plan(
                DecodeConfig(model=folder, load_format="dummy", dtype="bfloat16", kv_memory_gb=0.5, speculate=method)
            )
            for method in ("off", "suffix", "ngram")
        }
        worker = load_worker(plans["off"], SOLO, small_batches=True)
        worker.allocate_kv(worker.max_blocks)
        self._runner = worker.runner
        self._schedulers = {
            method: make_scheduler(plan, make_pool(plan, worker.max_blocks)) for method, plan in plans.items()
        }
        self._answers: dict[int, list[int]] = {}
        self._numbers = count(1)
        HostSampler.sample_rows = self._prescribed(HostSampler.sample_rows)  # type: ignore[method-assign]

    def _prescribed(self, draw: Any) -> Any:
        def sample_rows(sampler: HostSampler, rows: Any, specs: list[SampleSpec]) -> HostSamplerOutput:
            drawn = draw(sampler, rows, specs).wait()
            return HostSamplerOutput(
                [
                    SampledToken(self._answers[spec.params.seed][spec.num_generated], token.logprobs)
                    for token, spec in zip(drawn, specs, strict=True)
                ]
            )

        return sample_rows

    def run(self, speculate: str, streams: int, tokens: int, repeats: bool) -> dict[str, float]:
        """Tokens/s of so many streams of `tokens` tokens each, after their prompts; and what became of the guesses."""
        scheduler = self._schedulers[speculate]
        for number in range(streams):
            seed, draw = next(self._numbers), random.Random(number)
            prompt, answer = _texts(draw, tokens, repeats)
            self._answers[seed] = answer
            sampling = SamplingParams(seed=seed, max_tokens=tokens, temperature=0.0)
            key, request = AttemptKey(str(seed), 1), EngineRequest(pack_ids(prompt), sampling)
            scheduler.add(Sequence(key, request, prompt, root_hash(str(seed)), 0.0))
        while scheduler.waiting or any(seq.num_uncomputed > 1 for seq in scheduler.running.values()):
            self._step(scheduler)
        before = _counts(scheduler, speculate)
        started, generated = time.perf_counter(), 0
        while not scheduler.is_idle():
            generated += self._step(scheduler)
        seconds = time.perf_counter() - started
        drafted, accepted = (now - then for now, then in zip(_counts(scheduler, speculate), before, strict=True))
        return {"rate": generated / seconds, "drafted": drafted, "accepted": accepted}

    def _step(self, scheduler: Scheduler) -> int:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        started, step = time.perf_counter(), scheduled.step
        outputs = scheduler.update(scheduled, self._runner.launch(step).wait().sampled)
        tokens = sum(len(each.tokens) for each in outputs)
        if step.num_decode_seqs == len(step.query_lens):
            scheduler.drafting.timed(len(outputs), len(step.token_ids), tokens, time.perf_counter() - started)
        return tokens

    def proposal_s(self, tokens: int) -> float:
        """Median seconds of one proposal, in an answer that repeats a prompt with changes."""
        prompt, answer = _texts(random.Random(1), tokens, repeats=True)
        seq = Sequence(
            AttemptKey("p", 1),
            EngineRequest(pack_ids(prompt), SamplingParams(seed=1, max_tokens=tokens)),
            prompt,
            root_hash("p"),
            0.0,
        )
        seq.drafts = SequenceDrafts(Acceptance())
        proposer, times = IndexProposer("suffix"), []
        for token in answer:
            seq.tokens.ids.append(token)
            started = time.perf_counter()
            proposer.propose([seq], [16])
            times.append(time.perf_counter() - started)
        return median(times)


def _counts(scheduler: Scheduler, method: str) -> tuple[int, int]:
    found = scheduler.drafting.counts.get(method)
    return (found.drafted, found.accepted) if found is not None else (0, 0)


def _texts(draw: random.Random, tokens: int, repeats: bool) -> tuple[list[int], list[int]]:
    """A prompt, and the answer to it."""
    lines = [[draw.randrange(10, _VOCAB) for _ in range(_LINE)] for _ in range(_LINES)]
    prompt = [token for line in lines for token in line]
    if not repeats:
        return prompt, [draw.randrange(10, _VOCAB) for _ in range(tokens)]
    answer: list[int] = []
    for number, line in enumerate(lines):
        answer += [draw.randrange(10, _VOCAB) for _ in line] if number % 10 == 5 else line
    return prompt, answer[:tokens]


def run(session: Session) -> Result:
    """Edits and texts without repeats, with guesses and without, in turns."""
    result = Result("speculation")
    session.stop_system()
    session.stop_plain()
    folder = make_model_folder(SHAPES["tiny" if session.options.quick else "33m"], session.folder / "speculation")
    worker = Worker("bench.speculation:Speculating", environ=PASSIVE, folder=str(folder))
    cases = [
        ("edit", 1, True, 2.2),
        ("edit", 8, True, 1.5),
        ("no repeats", 1, False, 0.98),
        ("no repeats", 16, False, 0.98),
    ]
    try:
        for name, streams, repeats, least in cases:
            tokens = session.repeats(600 if repeats else 200, 40)
            ratios: dict[str, list[float]] = {"suffix": [], "ngram": []}
            shares: list[float] = []
            for round_ in range(session.repeats(5, 1) + 1):
                plain = worker.call("run", speculate="off", streams=streams, tokens=tokens, repeats=repeats)
                for method, found in ratios.items():
                    ours = worker.call("run", speculate=method, streams=streams, tokens=tokens, repeats=repeats)
                    if round_ or session.options.quick:  # the first one is the warm-up
                        found.append(ours["rate"] / plain["rate"])
                        shares += [ours["accepted"] / ours["drafted"]] if ours["drafted"] and method == "suffix" else []
            share = f"{100 * median(shares):.0f} % of its guesses were right" if shares else "no guesses"
            title = f"{name}, {streams} stream{'s' if streams > 1 else ''}"
            result.add(f"suffix, {title}", median(ratios["suffix"]), "x plain", target=Target(least), note=share)
            result.add(f"ngram, {title}", median(ratios["ngram"]), "x plain")
        proposal_us = 1e6 * worker.call("proposal_s", tokens=600)
        result.add("a proposal", proposal_us, "us", target=Target(50, at_most=True))
    finally:
        worker.close()
    _draft_model(session, result)
    return result


def _draft_model(session: Session, result: Result) -> None:
    """The real small model with the draft that `bench.draft_training` made of it, if it is on this machine."""
    if session.options.quick or not (draft_folder() / "model.safetensors").is_file():
        return
    with contextlib.ExitStack() as stack:
        plain, drafting = (
            stack.enter_context(
                contextlib.closing(Worker("bench.draft_training:Guessing", environ=PASSIVE, speculate=speculate))
            )
            for speculate in ("off", f"draft:{draft_folder()}")
        )
        for temperature in (0.0, 1.0):
            ratios: list[float] = []
            for _ in range(session.repeats(5, 1) + 1):
                before = plain.call("rate", temperature=temperature, count=4)
                ratios.append(drafting.call("rate", temperature=temperature, count=4) / before)
            title = f"trained draft, 1 stream, temperature {temperature:g}"
            result.add(title, median(ratios[1:]), "x plain", target=Target(1.4))
