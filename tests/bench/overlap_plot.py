"""The overlap benchmark's samples as a picture. In the benchmark's own process; needs matplotlib."""

from __future__ import annotations

from pathlib import Path


def plot(samples: dict[int, dict[str, list[dict[str, float]]]], path: Path) -> bool:
    """Draw the added second-token latency of both modes over prompt lengths. Returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lengths = sorted(samples)
    for mode, colour in (("after prefill", "tab:red"), ("layer-wise", "tab:blue")):
        runs = [sorted(1e3 * sample["added_s"] for sample in samples[tokens][mode]) for tokens in lengths]
        axes.plot(lengths, [run[len(run) // 2] for run in runs], "o-", color=colour, label=f"relay {mode}")
        axes.fill_between(lengths, [run[0] for run in runs], [run[-1] for run in runs], color=colour, alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel="prompt length (tokens)", ylabel="added before the second token (ms)")
    axes.set_xticks(lengths, labels=[str(tokens) for tokens in lengths], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("KV relay over 1 Gbit/s, median and range")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True
