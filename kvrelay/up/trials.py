"""The requests that the banner of `kvrelay up` shows: ones that the model takes, one of them with a relay. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from common.base.errors import KvRelayError
from common.control.messages import Task

Explain = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""What a router's dry run (`POST /route` of its admin port) answers. Raises: KvRelayError if it refuses the prompt."""

_QUESTION = "What is the capital of France?"
_COUNTS = (40, 120, 400, 1200, 4000)
"""Numbers in the longer prompt that are tried."""


class Trial(NamedTuple):
    """A request: its path, its body as a word for a shell, and what it shows."""

    path: str
    word: str
    shows: str = ""


def trials(models: Mapping[str, Task], explain: Explain) -> list[Trial]:
    """Requests to one of the models, to one that generates if there is one: a short one, and one with a prompt that is long
    enough to be relayed, if the model relays any.
    """
    model = next((name for name, task in models.items() if task == "generate"), next(iter(models)))
    if models[model] == "embed":
        return [Trial("/v1/embeddings", _word({"model": model, "input": "A man is eating food."}))]
    if models[model] == "score":
        body = {"model": model, "query": "eating", "documents": ["A violin.", "Someone eats a meal."]}
        return [Trial("/v1/rerank", _word(body))]
    found = [_short(model, explain)]
    for count in _COUNTS:
        prompt = " ".join(map(str, range(1, count + 1)))
        if _mode({"model": model, "prompt": prompt}, explain) == "relayed":
            body = _word({"model": model, "prompt": "NUMBERS", "max_tokens": 16, "temperature": 0})
            shows = "a prompt that is long enough to be computed by the prefill node and relayed"
            return [*found, Trial("/v1/completions", body.replace("NUMBERS", f"""'"$(seq -s ' ' {count})"'"""), shows)]
    return found


def _short(model: str, explain: Explain) -> Trial:
    """A question, or for a model without a chat template the beginning of its answer."""
    if _mode({"model": model, "prompt": _QUESTION, "chat": True}, explain):
        messages = [{"role": "user", "content": _QUESTION}]
        return Trial("/v1/chat/completions", _word({"model": model, "messages": messages, "temperature": 0}))
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    return Trial("/v1/completions", _word(body))


def _mode(body: Mapping[str, Any], explain: Explain) -> str | None:
    """How the prompt would be computed; None if it is refused."""
    try:
        return explain(body).get("mode")
    except KvRelayError:
        return None


def _word(body: Mapping[str, Any]) -> str:
    return "'{}'".format(json.dumps(body).replace("'", "'\\''"))
