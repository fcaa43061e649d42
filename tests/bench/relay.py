"""The relay of KV: how fast it moves bytes between two processes, and whether prefill hides it."""

from __future__ import annotations

import asyncio

from bench import client
from bench.direct import DirectRouter, find_nodes
from bench.prefill import PROMPT
from bench.raw_zmq import raw_zmq_rate
from bench.results import Result, Target, median, percentile
from bench.session import Session
from bench.shape import random_prompt
from bench.worker import PASSIVE, Worker

_MIB = 2**20
_TRANSFERS = 8


def run(session: Session) -> Result:
    """Throughput, then time to first token with and without the relay."""
    result = Result("relay")
    _throughput(session, result)
    session.stop_plain()
    system = session.system()
    client.run(_hidden(session, result, system.process("redis")["address"]))
    return result


def _throughput(session: Session, result: Result) -> None:
    """Blocks lie in order in one run, at random places in the other, as in a pool long in use."""
    limits = session.limits
    messages = session.repeats(128, 16)
    raw = [raw_zmq_rate(2 * _MIB, messages)]
    for shuffled in (False, True):
        rates = []
        for _ in range(session.repeats(2)):
            rates += _relay_rates(session, shuffled)
            limits.measure_memcpy()
            raw.append(raw_zmq_rate(2 * _MIB, messages))
        result.add(
            f"KV relay, {PROMPT}-token prompts, blocks {'at random' if shuffled else 'in order'}",
            median(rates) / 1e9,
            "GB/s",
            limit=max(raw) / 1e9,
            limit_name="raw ZMQ, 2 MiB",
            target=Target(1.0),
            note=f"{_TRANSFERS} at once, gathered, hashed blocks checked, scattered; memcpy {limits.memcpy / 1e9:.1f} GB/s",
        )
        result.details["shuffled" if shuffled else "in order"] = rates


def _relay_rates(session: Session, shuffled: bool) -> list[float]:
    """Bytes/s from the grants to the last verified slice, several times over."""
    shape = session.shape
    sizes = {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tokens": PROMPT,
        "transfers": _TRANSFERS,
        "shuffled": shuffled,
    }
    expected_bytes = shape.kv_bytes_per_token() * PROMPT * _TRANSFERS
    rates = []
    destination = Worker("bench.relay_ends:RelayDestination", environ=PASSIVE, **sizes)
    try:
        source = Worker("bench.relay_ends:RelaySource", environ=PASSIVE, **sizes)
        try:
            address = destination.call("address")
            for number in range(session.repeats(4, 2)):
                destination.call("expect", number=number)
                source.call("prepare", number=number)
                destination.start("arrived")
                started = source.call("send", number=number, addresses=[address])
                ended, received = destination.result()
                assert received == expected_bytes, f"{received} bytes arrived, not {expected_bytes}"
                rates.append(received / (ended - started))
            assert destination.call("intact"), "the relayed KV differs from its source"
        finally:
            source.close()
    finally:
        destination.close()
    return rates[1:]  # the first one connects and touches the memory


async def _hidden(session: Session, result: Result, redis_url: str) -> None:
    """Interleaved pairs on one prefill node: relayed to the decode node, or computed for a node that never grants."""
    nodes = await find_nodes(redis_url)
    relayed, alone = [], []
    async with DirectRouter(nodes["prefill"].peer, nodes["decode"].peer) as router:
        for i in range(session.repeats(8, 2) + 1):
            for with_relay in (True, False) if i % 2 else (False, True):
                prompt = random_prompt(session.shape, PROMPT, session.rng)
                first_s, _ = await router.first_token_s(prompt, 2, relayed=with_relay)
                if i:  # the first pair warms up
                    (relayed if with_relay else alone).append(first_s)
        await asyncio.sleep(1.5)  # a pong with the final counters
        sent = router.loads["prefill"].relayed_bytes
    expected = session.shape.kv_bytes_per_token() * PROMPT * (len(relayed) + 1)
    assert sent >= expected, f"only {sent} bytes were relayed, {expected} were expected"
    ratios = [a / b for a, b in zip(relayed, alone, strict=True)]
    result.add(f"time to first token, {PROMPT} tokens, no relay", median(alone), "s")
    result.add(
        "time to first token with the relay",
        median(relayed),
        "s",
        limit=median(alone),
        limit_name="without",
        note=f"{sent / 1e6:.0f} MB were relayed in all",
    )
    result.add(
        "with / without, median of pairs",
        median(ratios),
        "x",
        target=Target(1.05, at_most=True),
        note=f"{len(ratios)} pairs, quartiles {percentile(ratios, 0.25):.3f} to {percentile(ratios, 0.75):.3f}",
    )
    result.details["pairs"] = list(zip(relayed, alone, strict=True))
