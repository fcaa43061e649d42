"""The real small model of `scripts/fetch-small-model`, Q4_1 in bfloat16: one stream of text, and the time to a first token."""

from __future__ import annotations

from bench import client
from bench.client import complete, decode_rate
from bench.results import Result, median
from bench.session import Session

from scripts.small_model import NAME, small_model

_TEXT = "The quick brown fox jumps over the lazy dog, and then it tells the story again. " * 24
_TOKENS = 128


def run(session: Session) -> Result:
    """Through router, prefill and decode node. Without the model nothing is measured, and a line says so."""
    result = Result("small_model")
    file = small_model()
    if file is None:
        print("small_model: not run, the model is not on this machine: scripts/fetch-small-model", flush=True)
        return result
    rates, firsts, reads = [], [], []
    with session.own_system("--model", str(file)) as up:
        for number in range(session.repeats(5) + 1):
            reads.append(session.limits.measure_read())
            stream = client.run(_stream(up.url, f"{number} {_TEXT}", session.repeats(_TOKENS, 16)))
            rates.append(decode_rate(stream))
            firsts.append(1e3 * stream.ttft_s)
    bound = max(reads) / file.stat().st_size
    result.add(
        "one stream, SmolLM2-135M, Q4_1", median(rates[1:]), "tok/s", limit=bound, limit_name="read bandwidth / file"
    )
    result.add("its first token, prompt of some 450 tokens", median(firsts[1:]), "ms")
    result.details = {"tokens/s": rates[1:], "ttft, ms": firsts[1:]}
    return result


async def _stream(url: str, prompt: str, tokens: int) -> client.Stream:
    return await (await complete(url, NAME, prompt, tokens)).wait()
