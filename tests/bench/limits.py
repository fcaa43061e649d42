"""Limits of the machine and of the bare libraries: shown as results, and the reference of all other figures."""

from __future__ import annotations

from bench import client
from bench.bare_http import BareServer, round_trip_s
from bench.raw_zmq import raw_zmq_rate
from bench.results import Result, median
from bench.session import Session

_MIB = 2**20


def run(session: Session) -> Result:
    """Memory, arithmetic, copies, ZMQ over loopback, HTTP."""
    result = Result("limits")
    limits = session.limits
    rounds = session.repeats(3)
    for _ in range(rounds):
        limits.measure_read()
        limits.measure_gemm("bfloat16")
        limits.measure_gemm("float32")
        limits.measure_memcpy()
    read, read_kernel = _best(limits.read)
    result.add("memory read", read / 1e9, "GB/s", note=f"best of {len(limits.read)} kernels: {read_kernel}")
    for dtype, rates in limits.gemm.items():
        rate, kernel = _best(rates)
        result.add(f"GEMM {dtype}", rate / 1e9, "GFLOP/s", note=f"best of {len(rates)}: {kernel}")
    result.add("memcpy, one thread", limits.memcpy / 1e9, "GB/s")
    for size in (1, 2, 4):
        rate = max(raw_zmq_rate(size * _MIB, session.repeats(256, 32)) for _ in range(rounds))
        result.add(
            f"ZMQ tcp loopback, {size} MiB messages", rate / 1e9, "GB/s", limit=limits.memcpy / 1e9, limit_name="memcpy"
        )
    with BareServer() as server:
        trips = client.run(round_trip_s(server.url, session.repeats(300, 30)))
    result.add("HTTP round trip, bare FastAPI", 1e3 * median(trips), "ms", note="new connection each, median")
    result.details = {"read": limits.read, "gemm": limits.gemm}
    return result


def _best(rates: dict[str, float]) -> tuple[float, str]:
    return max((rate, name) for name, rate in rates.items())
