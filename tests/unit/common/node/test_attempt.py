"""The messages with an attempt's tokens."""

from __future__ import annotations

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams, TokenChunk, TokenLogprobs
from common.engine.scheduled_step import SequenceOutput
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.node.attempt import token_chunk


def test_all_tokens_of_a_step_go_to_the_router_in_one_chunk_that_says_where_they_begin() -> None:
    key = AttemptKey("r", 1)
    request = EngineRequest(pack_ids([1, 2, 3]), SamplingParams(seed=0, max_tokens=9, logprobs=1))
    seq = Sequence(key, request, [1, 2, 3, 10, 11, 12, 13], root_hash("m"), 0.0)
    logprobs = [TokenLogprobs(-0.5, [token], [-0.5]) for token in (12, 13)]
    tokens = [SampledToken(token, each) for token, each in zip((12, 13), logprobs, strict=True)]
    assert token_chunk(SequenceOutput(seq, tokens, "length"), None) == TokenChunk(key, 2, [12, 13], logprobs, "length")
    without = [SampledToken(token) for token in (12, 13)]
    assert token_chunk(SequenceOutput(seq, without), None) == TokenChunk(key, 2, [12, 13])
