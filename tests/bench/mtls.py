"""What certificates cost: KV per second of a core over ZMQ, and time to first token, with and without, in interleaved pairs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from bench import client
from bench.results import Result, Target, median, percentile
from bench.session import Session
from bench.transports import relay
from bench.worker import PASSIVE, Worker
from support.system import System, running_system

from common.base.hashing import BLOCK_SIZE
from common.security.sealed_endpoints import OVERHEAD_BYTES
from common.security.sealing import Channel
from kvtransfer.transports.base import MESSAGE_BYTES

_SIZE = 64 * 2**20
_EQUAL = (1, 1)
_KINDS = ("zmq", "zmq_sealed")
_PROMPT, _VOCAB = 128, 2048
"""Tokens of a prompt, and token ids of the demo model."""
_WARM_UP = 3
"""Pairs that connect."""


def run(session: Session) -> Result:
    """Both figures, each beside the one without certificates."""
    result = Result("mtls")
    session.stop_system()
    session.stop_plain()
    _relay(session, result)
    _first_token(session, result)
    return result


def _relay(session: Session, result: Result) -> None:
    shape = session.shape
    token_bytes = shape.kv_bytes_per_token()
    sizes: dict[str, Any] = {"layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    sizes |= {"tokens": _SIZE // (token_bytes * BLOCK_SIZE) * BLOCK_SIZE, "transfers": 1, "shuffled": True}
    rounds = [_rounds_of(session, sizes, token_bytes) for _ in range(session.repeats(10, 1))]
    plain, sealed = (median([each[kind] for each in rounds]) / 1e9 for kind in _KINDS)
    shares = [each["zmq_sealed"] / each["zmq"] for each in rounds]
    share = median(shares)
    cipher = _cipher_rate() / 1e9
    result.add("relay over ZMQ, for a second of one core of both ends", plain, "GB")
    result.add(
        "the same with certificates (AEGIS-128L)",
        sealed,
        "GB",
        limit=sealed / share,
        limit_name="in clear, by pairs",
        target=Target(0.9, of_share=True),
        note=f"{len(rounds)} sets of processes, {min(shares):.0%} to {max(shares):.0%}; the cipher alone: {cipher:.1f} GB/s; "
        f"at both ends this leaves {1 / (1 + 2 * plain / cipher):.0%}",
    )
    result.details["bytes per core-second, medians of each set of processes"] = rounds


def _rounds_of(session: Session, sizes: dict[str, Any], token_bytes: int) -> dict[str, float]:
    """Bytes per core-second of each kind, medians of relays in turn between new processes.

    The rate of one pair of processes stays up to a third above or below that of another, as long as they live.
    """
    per_core: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with contextlib.ExitStack() as stack:
        ends = {kind: _ends(stack, kind, sizes) for kind in _KINDS}
        for turn in range(session.repeats(21, 3)):
            for kind in _KINDS if turn % 2 else reversed(_KINDS):
                source, target = ends[kind]
                before_s = source.call("cpu_s") + target.call("cpu_s")
                relay(turn, _EQUAL, [source], _EQUAL, [target])
                spent_s = source.call("cpu_s") + target.call("cpu_s") - before_s
                if turn:  # the first one connects and touches the memory
                    per_core[kind].append(sizes["tokens"] * token_bytes / spent_s)
    return {kind: median(found) for kind, found in per_core.items()}


def _ends(stack: contextlib.ExitStack, kind: str, sizes: dict[str, Any]) -> list[Worker]:
    """A source and a destination of relays over the transport `kind`, which end with `stack`."""
    made = (
        Worker(f"bench.relay_ends:{end}", environ=PASSIVE, layout=_EQUAL, rank=0, transport=kind, **sizes)
        for end in ("RelaySource", "RelayDestination")
    )
    return [stack.enter_context(contextlib.closing(worker)) for worker in made]


def _cipher_rate() -> float:
    """Bytes per second of a core that are sealed, in messages as large as those of a relay."""
    channel, message, count = Channel(bytes(16), bytes(16)), os.urandom(MESSAGE_BYTES), 500
    sealed = bytearray(len(message) + OVERHEAD_BYTES)
    started_s = time.process_time()
    for _ in range(count):
        channel.seal_into(message, sealed)
    return count * len(message) / (time.process_time() - started_s)


def _first_token(session: Session, result: Result) -> None:
    """On the demo model, whose prefill takes little: what remains is mostly links and transfers."""
    args = ("--model", "demo", "--kv-transport", "zmq", "--local-prefill-tokens", "0", "--log-level", "warning")
    with contextlib.ExitStack() as stack:
        systems: list[System] = []
        for more in ((), ("--tls",)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-bench-")))
            systems.append(stack.enter_context(running_system(folder, *args, *more)))
        for system in systems:
            system.wait_usable()
        pairs = client.run(_pairs(session, systems))
    plain, secured = ([pair[n] for pair in pairs] for n in (0, 1))
    more_ms = [1000 * (b - a) for a, b in pairs]
    result.add(f"time to first token, demo model, {_PROMPT} tokens, KV over ZMQ", 1000 * median(plain), "ms")
    result.add("the same with certificates", 1000 * median(secured), "ms")
    result.add(
        "more with certificates, median of pairs",
        median(more_ms),
        "ms",
        target=Target(0.3, at_most=True),
        note=f"{len(pairs)} pairs, quartiles {percentile(more_ms, 0.25):.2f} to {percentile(more_ms, 0.75):.2f}",
    )
    result.details["time to first token, pairs"] = pairs


async def _pairs(session: Session, systems: list[System]) -> list[tuple[float, float]]:
    """Seconds to the first token without and with certificates."""
    pairs: list[tuple[float, float]] = []
    models = httpx.get(f"{systems[0].url}/v1/models", timeout=10).json()["data"]
    name = str(models[0]["id"])
    for turn in range(session.repeats(1000, 10) + _WARM_UP):
        prompt = [session.rng.randrange(256, _VOCAB) for _ in range(_PROMPT)]
        found = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            stream = await (await client.complete(systems[which].url, name, prompt, 2)).wait()
            found[which] = stream.token_times()[0][0] - stream.sent_s
        if turn >= _WARM_UP:
            pairs.append((found[0], found[1]))
    return pairs
