"""Valid messages that the targets mutate: calls to the API, control messages, headers of KV."""

from __future__ import annotations

import random
from typing import Any

from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Grammar,
    Grant,
    Message,
    NodeRecord,
    Offer,
    Ping,
    PrefillDone,
    PrefillRequest,
    SamplingParams,
    TransferAbort,
    TransferReceived,
)
from common.control.pooling import PoolInput, PoolRequest
from kvtransfer import wire

_CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
HOSTS = ("localhost", "127.0.0.1:8000", "[::1]:80", "evil.example", "evil@127.0.0.1", "127.0.0.1.evil.example:1")
HTTP_CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 2, "logprobs": 1, "seed": 3, "stop": ["x"]}),
    (
        "POST",
        "/v1/completions",
        {"prompt": [[1, 2, 3]], "max_tokens": 1, "echo": True, "n": 2, "logit_bias": {"5": 1.5}},
    ),
    (
        "POST",
        "/v1/completions",
        {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("POST", "/v1/chat/completions", _CHAT),
    ("POST", "/v1/chat/completions", {**_CHAT, "tools": [_TOOL], "tool_choice": "required"}),
    (
        "POST",
        "/v1/chat/completions",
        {
            **_CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": _TOOL["function"]["parameters"]},
            },
        },
    ),  # type: ignore[index]
    (
        "POST",
        "/v1/chat/completions",
        {**_CHAT, "guided_regex": "[a-z]{1,4}", "temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
    ),
    ("POST", "/v1/responses", {"model": "demo", "input": "hi", "max_output_tokens": 16}),
    ("POST", "/v1/messages", {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}),
    ("POST", "/v1/embeddings", {"model": "demo", "input": ["a", "b"]}),
    ("POST", "/v1/rerank", {"model": "demo", "query": "a", "documents": ["b", "c"]}),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    (
        "POST",
        "/api/chat",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": False,
            "options": {"num_predict": 2},
        },
    ),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
]


def control_messages(node: NodeRecord, nodes: list[NodeRecord]) -> list[Message]:
    """One of each kind, as routers and nodes send them to `node`. Attempts end soon: they ask for two tokens."""
    key, other = AttemptKey("fuzz", 1), nodes[0].peer
    sampling = SamplingParams(
        1, 2, 0.0, stop_token_ids=[3], logit_bias=[(4, 1.0)], bad_words=[pack_ids([1, 2])], logprobs=1
    )
    asked = EngineRequest(pack_ids([1, 2, 3, 4, 5]), sampling._replace(grammar=Grammar('%llguidance {}\nstart: "a"')))
    plain = EngineRequest(pack_ids(list(range(20))), sampling, "salt", 1)
    return [
        PrefillRequest(key, plain, pack_ids(), other, 2.0),
        DecodeRequest(key, asked, pack_ids([7]), None, 2.0),
        DecodeRequest(key, plain, pack_ids(), nodes[-1].peer, 2.0),
        PoolRequest(key, [PoolInput(pack_ids([1, 2]))], True, 0, False, 1.0),
        Abort(key),
        Ping("fuzz", 0.0),
        Offer(key, other, node.layout, 20, bytes(16)),
        Grant(key, node.peer, node.layout, [0], [pack_ids([0, 1])]),
        PrefillDone(key, 5),
        TransferReceived(key, 10),
        TransferAbort(key, "aborted", "fuzz"),
        AttemptFailed(key, "overloaded", "fuzz"),
        node,
    ]


def data_header(rng: random.Random, node: NodeRecord) -> bytes:
    """The header of a message with the KV of one block in one layer."""
    part = wire.KVSlice(0, 0, 1, 0, 1, 0, 1)
    incarnation = node.peer.incarnation if rng.random() < 0.8 else "other"
    return wire.encode(
        wire.SliceHeader(AttemptKey("fuzz", 1), "src", incarnation, 0, 0, rng.randrange(9), [part], 0, bytes(16))
    )
