"""Delay of the second token by the relay on a slow link: layer by layer during prefill, compared with after prefill.

The two hosts are network namespaces (`network_hosts`); a token bucket limits the link between them to 1 Gbit/s; root only.
"After" is the same sender, which is told about all layers once the first token is known.
"""

from __future__ import annotations

from typing import Any

from bench.overlap_plot import plot
from bench.results import Result, Target, median
from bench.session import Session
from bench.shape import Shape, make_model_folder
from bench.worker import PASSIVE, Worker
from support.network_hosts import Network, why_not

_MBIT_S = 1000.0
_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_TARGET_LENGTH = 2048
_CHUNK = 512
_SHAPES = {
    # Computed slowly here, relayed in float32: 128 KiB of KV per token, as an 8B model's in bfloat16. The transfer of
    # a prompt at 1 Gbit/s then takes as long, roughly, as one core takes to compute it.
    "0.5b": Shape(
        "wide-kv", hidden=256, layers=8, q_heads=16, kv_heads=16, intermediate=256, vocab=20_000, head_dim=128
    ),
    "tiny": Shape("tiny-kv", hidden=128, layers=2, q_heads=4, kv_heads=4, intermediate=128, vocab=2_000),
}
Sample = dict[str, float]


def run(session: Session) -> Result:
    """Pairs of both modes, alternating, at every length; a plot beside the JSON."""
    result = Result("overlap")
    reason = why_not()
    if reason is not None:
        result.add("layer-wise / after prefill", float("nan"), "x", note=f"not measured: {reason}")
        return result
    session.stop_system()
    session.stop_plain()
    shape = _SHAPES[session.options.shape]
    samples = _measure(session, shape)
    _report(result, shape, samples)
    result.details |= {"shape": vars(shape), "chunk": _CHUNK, "mbit_s": _MBIT_S, "samples": samples}
    picture = session.results / "overlap.png"
    result.details["plot"] = picture.name if plot(samples, picture) else "not drawn: matplotlib is not installed"
    return result


def _measure(session: Session, shape: Shape) -> dict[int, dict[str, list[Sample]]]:
    """Per length and mode, one sample per repetition."""
    folder = str(make_model_folder(shape, session.folder.parent))
    blocks = max(_LENGTHS) // 16 + 1
    model = {"model": folder, "load_format": "dummy", "dtype": "float32", "kv_blocks": blocks, "threads": 1}
    samples: dict[int, dict[str, list[Sample]]] = {n: {"layer-wise": [], "after prefill": []} for n in _LENGTHS}
    with Network("prefill", "decode") as network:
        here, there = network.hosts["prefill"], network.hosts["decode"]
        here.slow_down(_MBIT_S)
        environ = {**PASSIVE, "OMP_NUM_THREADS": "1"}
        target = Worker(
            "bench.overlap_ends:OverlapDestination", environ=environ, host=there, bind=there.address, **model
        )
        try:
            source = Worker("bench.overlap_ends:OverlapSource", environ=environ, host=here, chunk=_CHUNK, **model)
            try:
                pair = _Pair(source, target)
                pair.sample(_LENGTHS[0], layer_wise=True)  # connects
                for turn in range(session.repeats(3)):
                    for tokens in _LENGTHS:
                        for mode in ("layer-wise", "after prefill")[:: 1 if turn % 2 else -1]:
                            samples[tokens][mode].append(pair.sample(tokens, layer_wise=mode == "layer-wise"))
            finally:
                source.close()
        finally:
            target.close()
    return samples


class _Pair:
    """The two engines."""

    def __init__(self, source: Worker, target: Worker) -> None:
        self._source, self._target = source, target
        self._number = 0

    def sample(self, tokens: int, *, layer_wise: bool) -> Sample:
        """One prompt. Seconds of prefill, and from the first token to the second one and of that one's step."""
        self._number += 1
        at = {"number": self._number, "tokens": tokens}
        self._target.call("expect", **at)
        address = self._target.call("address")
        prefill: dict[str, Any] = self._source.call("prefill", **at, address=address, layer_wise=layer_wise)
        decode: dict[str, Any] = self._target.call("second_token", **at, first=prefill["first"])
        expected = self._source.call("released", **at, first=prefill["first"])
        assert decode["second"] == expected, f"second token {decode['second']}, on the source's own KV {expected}"
        step_s = decode["second_s"] - decode["step_s"]
        return {
            "prefill_s": prefill["first_s"] - prefill["started"],
            "added_s": decode["second_s"] - prefill["first_s"] - step_s,
            "step_s": step_s,
        }


def _report(result: Result, shape: Shape, samples: dict[int, dict[str, list[Sample]]]) -> None:
    for tokens, modes in samples.items():
        layer_wise, after = modes["layer-wise"], modes["after prefill"]
        added = [1e3 * median([s["added_s"] for s in mode]) for mode in (layer_wise, after)]
        prefill = [median([s["prefill_s"] for s in mode]) for mode in (layer_wise, after)]
        size_bytes = shape.kv_bytes_per_token(4) * tokens
        result.add(
            f"added before token 2, {tokens} tokens, layer-wise",
            added[0],
            "ms",
            limit=added[1],
            limit_name="after prefill",
            target=Target(0.35, at_most=True, of_share=True) if tokens == _TARGET_LENGTH else None,
            note=(
                f"{size_bytes / 1e6:.0f} MB, {1e3 * size_bytes * 8 / (_MBIT_S * 1e6):.0f} ms on the wire; "
                f"prefill {1e3 * prefill[0]:.0f} ms, without sending meanwhile {1e3 * prefill[1]:.0f} ms"
            ),
        )
        whole = [median([s["prefill_s"] + s["added_s"] for s in mode]) for mode in (layer_wise, after)]
        if tokens == _TARGET_LENGTH:
            result.add(
                f"prompt to ready for token 2, {tokens} tokens, layer-wise",
                whole[0],
                "s",
                limit=whole[1],
                limit_name="after prefill",
            )
