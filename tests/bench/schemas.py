"""Throughput of answers to random JSON schemas, against answers of the same lengths without a grammar."""

from __future__ import annotations

import random
import time
from typing import Any

from bench.results import Result, Target, median
from bench.session import Session
from bench.worker import PASSIVE, Worker
from support.random_schemas import random_schema

from kvrelay import LLM, SamplingParams

_BATCH, _PROMPT, _MAX_TOKENS = 16, 32, 64


class Offline:
    """A node in a worker process."""

    def __init__(self, folder: str) -> None:
        self._llm = LLM(model=folder, load_format="dummy", dtype="bfloat16", kv_memory_gb=0.5, max_num_seqs=_BATCH)

    def answers(self, schemas: list[dict[str, Any]], lengths: list[int]) -> dict[str, Any]:
        """Answers to these schemas, or, if there are none, of these numbers of tokens. Returns the numbers and seconds."""
        if schemas:
            params = [
                SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, structured_outputs={"json": schema})
                for schema in schemas
            ]
        else:
            params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        draw = random.Random(1)
        prompts = [{"prompt_token_ids": [draw.randrange(256, 4096) for _ in range(_PROMPT)]} for _ in params]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"lengths": [len(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}


def run(session: Session) -> Result:
    """A thousand schemas in ten parts, sixteen sequences at a time; alternating pairs."""
    result = Result("schemas")
    session.stop_system()
    session.stop_plain()
    count = session.repeats(100, 32)
    worker = Worker("bench.schemas:Offline", environ=PASSIVE, folder=str(session.folder))
    ratios, tokens = [], 0
    try:
        for part in range(session.repeats(10) + 1):
            schemas = [random_schema(random.Random(part * count + number)) for number in range(count)]
            having = worker.call("answers", schemas=schemas, lengths=[])
            without = worker.call("answers", schemas=[], lengths=having["lengths"])
            result.details[f"part {part}"] = (having, without)
            if part:  # the first is the warm-up
                ratios.append(without["seconds"] / having["seconds"])
                tokens += sum(having["lengths"])
    finally:
        worker.close()
    result.add(
        f"{count * len(ratios)} random schemas, batch {_BATCH}: throughput lost",
        100 * (1 - median(ratios)),
        "%",
        target=Target(5, at_most=True),
        note=f"{tokens} tokens; parts {100 * (1 - max(ratios)):.1f} to {100 * (1 - min(ratios)):.1f} %",
    )
    return result
