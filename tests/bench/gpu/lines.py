"""The lines of `gpu-bench`: each function measures one group and adds its figures beside their limits, as it gets them."""

from __future__ import annotations

import asyncio
import math
import time

from bench.client import Stream, complete, gaps
from bench.direct import DirectRouter, find_nodes
from bench.gpu.session import GpuSession
from bench.results import Result, Target, median, percentile
from bench.shape import Shape, random_prompt
from bench.worker import Worker, WorkerFailed
from support.system import System


def limits(session: GpuSession, result: Result) -> None:
    """What the GPU can do, before anything is held against it."""
    result.add("device copy, read and written", session.limits["copy_bandwidth"] / 1e9, "GB/s")
    result.add("bf16 product of 8192-cubes", session.limits["matrix_rate"] / 1e12, "TFLOP/s")
    if any(math.isnan(limit) for limit in session.limits.values()):
        raise RuntimeError("a limit could not be measured: what is held against it has no share")


def decode(session: GpuSession, result: Result) -> None:
    """Decode steps of the big shape against reading its weights and KV once."""
    sizes, shape = session.sizes, session.shape("big")
    most = max(sizes.batches)
    with session.engine("big", most, sizes.context + 256) as engine:
        for batch in (1, *sizes.batches):
            context = sizes.context if batch > 1 else 64
            step_s = _step_s(session, engine, batch, context)
            kv_bytes = batch * (context + sizes.steps // 2) * shape.kv_bytes_per_token()
            bound_s = (shape.weight_bytes_per_token() + (kv_bytes if batch > 1 else 0)) / session.limits[
                "copy_bandwidth"
            ]
            result.add(
                f"{shape.name} decode, batch {batch}, context {context}",
                batch / step_s,
                "tok/s",
                limit=batch / bound_s,
                limit_name="copy bandwidth / bytes of weights" + (" and KV" if batch > 1 else ""),
                target=Target(0.85 if batch == 1 else 0.75, of_share=True),
                note=f"a step takes {1e3 * step_s:.2f} ms",
            )
        session.notes["step_s"] = _step_s(session, engine, min(sizes.batches), sizes.stream_prompt)
        _outside_kernels(session, result, engine)


def decode_small(session: GpuSession, result: Result) -> None:
    """Tokens/s of the small shape alone, where launching costs more than reading."""
    small = session.shape("small")
    with session.engine("small", 1, 512) as engine:
        step_s = _step_s(session, engine, 1, 64)
    bound = session.limits["copy_bandwidth"] / small.weight_bytes_per_token()
    result.add(
        f"{small.name} decode, batch 1", 1 / step_s, "tok/s", limit=bound, limit_name="by bandwidth", target=Target(700)
    )


def _step_s(session: GpuSession, engine: Worker, batch: int, context: int) -> float:
    return median(engine.call("decode", batch=batch, context=context, steps=session.sizes.steps))


def _outside_kernels(session: GpuSession, result: Result, engine: Worker) -> None:
    sizes = session.sizes
    batch = min(sizes.batches)
    step_s = _step_s(session, engine, batch, sizes.context)
    busy_s = engine.call("busy_s", batch=batch, context=sizes.context, steps=min(10, sizes.steps))
    if not busy_s:
        raise RuntimeError("the profiler saw no kernel: it may not be allowed to here")
    result.add(
        f"share of a decode step outside of kernels, batch {batch}",
        100 * max(0.0, 1 - busy_s / step_s),
        "%",
        target=Target(3, at_most=True),
        note=f"kernels run for {1e3 * busy_s:.2f} of {1e3 * step_s:.2f} ms; the profiler's steps against others",
    )


def quantized(session: GpuSession, result: Result) -> None:
    """Decode steps and a prompt of the big shape on quantized weights, against its own bfloat16."""
    sizes, shape = session.sizes, session.shape("big")
    batches, baseline = (1, min(sizes.batches)), dict[str, float]()
    for quantization in ("auto", "int8", "int4"):
        with session.engine("big", max(batches), max(sizes.prefill, sizes.context + 256), quantization) as engine:
            rates = {
                f"decode, batch {batch}": batch / _step_s(session, engine, batch, 64 if batch == 1 else sizes.context)
                for batch in batches
            }
            whole = engine.call("prefill", tokens=sizes.prefill, chunk=sizes.prefill_chunk, times=sizes.repeats)
        rates[f"prefill of {sizes.prefill} tokens"] = sizes.prefill / median(whole)
        baseline = baseline or rates
        for what, rate in rates.items() if quantization != "auto" else ():
            name = f"{shape.name} {quantization}, {what}"
            result.add(name, rate, "tok/s", limit=baseline[what], limit_name="bfloat16")


def prefill(session: GpuSession, result: Result) -> None:
    """A long prompt of the big shape against the matrix rate."""
    sizes, shape = session.sizes, session.shape("big")
    with session.engine("big", 1, sizes.prefill) as engine:
        taken_s = median(engine.call("prefill", tokens=sizes.prefill, chunk=sizes.prefill_chunk, times=sizes.repeats))
    result.add(
        f"{shape.name} prefill of {sizes.prefill} tokens",
        shape.prefill_flop(sizes.prefill) / taken_s / 1e12,
        "TFLOP/s",
        limit=session.limits["matrix_rate"] / 1e12,
        limit_name="bf16 product",
        target=Target(0.65, of_share=True),
        note=f"{sizes.prefill / taken_s:,.0f} tokens/s",
    )


def relay(session: GpuSession, result: Result) -> None:
    """KV between two processes of one GPU."""
    sizes, shape = session.sizes, session.shape("big")
    transport = "shm" if session.dry_run else "cuda_ipc"
    ends = {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tokens": sizes.relay_tokens,
        "transfers": sizes.relay_transfers,
        "shuffled": True,
        "transport": transport,
        "device": session.device,
    }
    rates: list[float] = []
    with (
        session.worker("bench.relay_ends:RelayDestination", **ends) as destination,
        session.worker("bench.relay_ends:RelaySource", **ends) as source,
    ):
        address = destination.call("address")
        for number in range(sizes.repeats + 1):
            destination.call("expect", number=number)
            source.call("prepare", number=number)
            destination.start("arrived")
            started = source.call("send", number=number, addresses=[address])
            ended, received = destination.result()
            rates.append(received / (ended - started))
        if not destination.call("intact"):
            raise RuntimeError("the relayed KV differs from its source")
    result.add(
        f"KV relay over {transport}, {sizes.relay_transfers} prompts of {sizes.relay_tokens} tokens, blocks at random",
        2 * median(rates[1:]) / 1e9,
        "GB/s",
        limit=session.limits["copy_bandwidth"] / 1e9,
        limit_name="device copy",
        target=Target(0.6, of_share=True),
        note="bytes read and written, as of the copy; from the grants to the last verified slice",
    )


def ttft(session: GpuSession, result: Result) -> None:
    """The time to first token with and without the relay."""
    system = session.system("big", prefill=1)
    session.run(_first_tokens(session, result, system.process("redis")["address"]))


async def _first_tokens(session: GpuSession, result: Result, redis_url: str) -> None:
    """Interleaved pairs on one prefill node: relayed to the decode node, or computed for a node that never grants."""
    sizes = session.sizes
    nodes = await find_nodes(redis_url)
    pairs: list[tuple[float, float]] = []
    async with DirectRouter(nodes["prefill"].peer, nodes["decode"].peer) as router:
        for i in range(2 * sizes.repeats + 1):
            taken: dict[bool, float] = {}
            for with_relay in (True, False) if i % 2 else (False, True):
                prompt = random_prompt(session.shape("big"), sizes.ttft_tokens, session.rng)
                taken[with_relay], _ = await router.first_token_s(prompt, 2, relayed=with_relay)
            pairs.append((taken[True], taken[False]))
    pairs = pairs[1:]
    result.add(
        f"time to first token of {sizes.ttft_tokens} tokens, with the relay",
        1e3 * median([relayed for relayed, _ in pairs]),
        "ms",
        limit=1e3 * median([alone for _, alone in pairs]),
        limit_name="without",
        note=f"{len(pairs)} pairs",
    )
    result.add(
        "with / without, median of pairs", median([a / b for a, b in pairs]), "x", target=Target(1.03, at_most=True)
    )


def interference(session: GpuSession, result: Result) -> None:
    """Running streams while long prompts arrive: prefill and decode side by side on the GPU, and colocated."""
    sizes = session.sizes
    p99: dict[str, float] = {}
    for name, nodes in (("prefill and decode side by side", 1), ("colocated chunked prefill", 0)):
        quiet, loaded, ttfts = session.run(_streams_and_prompts(session, session.system("big", prefill=nodes)))
        p99[name] = percentile(loaded, 0.99)
        result.add(
            f"{sizes.streams} streams, {name}: ITL p99",
            1e3 * p99[name],
            "ms",
            limit=1e3 * percentile(quiet, 0.99),
            limit_name="without prompts",
            note=f"p50 {1e3 * median(loaded):.1f} ms; TTFT of {sizes.long_prompt} tokens {median(ttfts):.2f} s, "
            f"longest {max(ttfts):.2f} s",
        )
    beside, colocated = p99.values()
    result.add("ITL p99, side by side / colocated", beside / colocated, "x")


async def _streams_and_prompts(session: GpuSession, system: System) -> tuple[list[float], list[float], list[float]]:
    """Gaps of the streams while nothing else runs, gaps while prompts arrive, and the prompts' times to first token."""
    sizes, shape = session.sizes, session.shape("big")
    model, url = session.folder("big").name, system.url
    quiet_s = sizes.arrivals * sizes.arrival_s / 3
    # Long enough not to end, short enough that all of them fit the decode node's KV memory at their longest.
    blocks = max(node["load"]["kv_blocks_total"] for node in system.admin("nodes")["nodes"] if node["role"] == "decode")
    tokens = min(20_000, int(0.75 * 16 * blocks / sizes.streams)) - sizes.stream_prompt
    opened = (complete(url, model, _prompt(session, shape, sizes.stream_prompt), tokens) for _ in range(sizes.streams))
    streams: list[Stream] = list(await asyncio.gather(*opened))
    try:
        for stream in streams:
            await stream.wait_first()
        await asyncio.sleep(1.0)
        begun = time.perf_counter()
        await asyncio.sleep(quiet_s)
        loaded_from = time.perf_counter()
        arrivals: list[asyncio.Task[Stream]] = []
        for _ in range(sizes.arrivals):
            arrivals.append(asyncio.create_task(_answer(url, model, _prompt(session, shape, sizes.long_prompt))))
            await asyncio.sleep(sizes.arrival_s)
        answered = await asyncio.gather(*arrivals)
        ended = time.perf_counter()
        if any(stream.ended.is_set() for stream in streams):
            raise RuntimeError("a background stream ended before the measurement did")
    finally:
        for stream in streams:
            stream.close()
    quiet = [gap for _, gap in gaps(streams, begun, loaded_from)]
    loaded = [gap for _, gap in gaps(streams, loaded_from, ended)]
    return quiet, loaded, [stream.ttft_s for stream in answered]


def _prompt(session: GpuSession, shape: Shape, tokens: int) -> list[int]:
    return random_prompt(shape, tokens, session.rng)


async def _answer(url: str, model: str, prompt: list[int], tokens: int = 2) -> Stream:
    return await (await complete(url, model, prompt, tokens)).wait()


def peer(session: GpuSession, result: Result) -> None:
    """Output tokens/s of many requests at once, beside `transformers`' own continuous batching: the small shape."""
    _beside_transformers(session, result, "small")


def peer_big(session: GpuSession, result: Result) -> None:
    """As `peer`, of the big shape."""
    _beside_transformers(session, result, "big")


def _beside_transformers(session: GpuSession, result: Result, kind: str) -> None:
    sizes, url = session.sizes, session.system(kind, prefill=1).url
    rates = [session.run(_serve(session, kind, url)) for _ in range(2)]
    theirs, failed = None, None
    try:
        with session.worker(
            "bench.gpu.peer:Transformers", folder=str(session.folder(kind)), device=session.device
        ) as other:
            theirs = other.call(
                "serve", requests=sizes.peer_requests, prompt=sizes.peer_prompt, tokens=sizes.peer_tokens
            )
    except WorkerFailed as error:
        failed = error  # ours is told all the same
    result.add(
        f"{session.shape(kind).name}, {sizes.peer_requests} at once, {sizes.peer_prompt} in, {sizes.peer_tokens} out, over HTTP",
        rates[-1],
        "tok/s",
        limit=theirs,
        limit_name="transformers, in process",
        target=Target(5, of_share=True),
    )
    if failed is not None:
        raise failed


async def _serve(session: GpuSession, kind: str, url: str) -> float:
    sizes, shape = session.sizes, session.shape(kind)
    prompts = [_prompt(session, shape, sizes.peer_prompt) for _ in range(sizes.peer_requests)]
    started = time.perf_counter()
    model = session.folder(kind).name
    await asyncio.gather(*(_answer(url, model, prompt, sizes.peer_tokens) for prompt in prompts))
    return sizes.peer_requests * sizes.peer_tokens / (time.perf_counter() - started)


def hidden(session: GpuSession, result: Result) -> None:
    """What serving adds to a decode step: the gap between a stream's tokens against the bare engine's step."""
    sizes = session.sizes
    batch = min(sizes.batches)
    if "step_s" not in session.notes:
        with session.engine("big", batch, sizes.stream_prompt + 256) as engine:
            session.notes["step_s"] = _step_s(session, engine, batch, sizes.stream_prompt)
    step_s = session.notes["step_s"]
    itl_s = session.run(_gap(session, session.system("big", prefill=1).url, batch))
    result.add(
        f"gap between tokens, {batch} streams over HTTP",
        1e3 * itl_s,
        "ms",
        limit=1e3 * step_s,
        limit_name="the engine's step, same context",
        target=Target(1.03, at_most=True, of_share=True),
        note="1.0 is step preparation hidden altogether",
    )


async def _gap(session: GpuSession, url: str, batch: int) -> float:
    sizes, shape = session.sizes, session.shape("big")
    model = session.folder("big").name
    tokens = 200 if not session.dry_run else 20
    prompts = [_prompt(session, shape, sizes.stream_prompt) for _ in range(batch)]
    streams = await asyncio.gather(*(_answer(url, model, prompt, tokens) for prompt in prompts))
    joined = max(stream.token_times()[0][0] for stream in streams)
    return median([gap for _, gap in gaps(list(streams), joined)])
