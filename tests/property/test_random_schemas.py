"""Answers of a model with random weights to random schemas: whenever one ends by itself it validates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from support.oracle import make_tiny
from support.random_schemas import random_schema
from support.tiny_engine import NUM_BLOCKS, VOCAB, make_runner

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, FinishReason, Grammar, SamplingParams
from common.engine.grammar.compile import compile_grammar
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.kv.pool import BlockPool
from router.structured.json_schema import json_schema_grammar

EOS = VOCAB - 1


class _Bytes:
    """One token for each byte; the last one never occurs in UTF-8 and ends a sequence."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = tuple(bytes([value]) for value in range(VOCAB))
    is_tokenizer_wrapper = True

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_answers_that_end_by_themselves_validate(tmp_path: Path, count: int) -> None:
    runner = make_runner(make_tiny("qwen2", tmp_path / "qwen2"), overlaps=False)
    schemas = {str(seed): random_schema(random.Random(seed)) for seed in range(count)}
    answers = answer_all(schemas, runner)
    ended = 0
    for name, schema in schemas.items():
        token_ids, reason = answers[name]
        text = bytes(token_id for token_id in token_ids if token_id != EOS)
        if reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert ended > count / 2


def answer_all(schemas: dict[str, dict[str, Any]], runner: Any) -> dict[str, tuple[list[int], FinishReason]]:
    tokenizer = LLTokenizer(_Bytes(), n_vocab=VOCAB, eos_token=[EOS])  # type: ignore[arg-type]
    scheduler = Scheduler(SchedulerConfig(128, 6, 32, 8), BlockPool(NUM_BLOCKS))
    for number, (name, schema) in enumerate(schemas.items()):
        grammar = Grammar(json_schema_grammar(schema))
        params = SamplingParams(number, 100, stop_token_ids=[EOS], grammar=grammar)
        request = EngineRequest(pack_ids([5, 6, number % 200]), params)
        seq = Sequence(AttemptKey(name, 1), request, list(request.prompt_ids), root_hash("f"), 0.0)
        seq.tokens.set_grammar(compile_grammar(tokenizer, grammar.source), [EOS])
        scheduler.add(seq)
    answers: dict[str, tuple[list[int], FinishReason]] = {}
    while (plan := scheduler.schedule()) is not None:
        for done in scheduler.update(plan, runner.launch(plan.step).wait().sampled):
            assert done.error is None, f"{done.error}: {schemas[done.seq.key.request_id]}"
            if done.finish_reason is not None:
                seq = done.seq
                answers[seq.key.request_id] = (seq.tokens.ids[seq.tokens.prompt_len :], done.finish_reason)
    assert scheduler.pool.num_used == 0
    return answers
