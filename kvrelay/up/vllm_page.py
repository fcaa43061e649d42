"""The page docs/vllm-options.md, made from the table: `python -m kvrelay.up.vllm_page > docs/vllm-options.md`."""

from __future__ import annotations

from collections import defaultdict

from kvrelay.up.vllm_options import OPTIONS, SHORT, Does

_HEAD = """# vLLM's command line

`kvrelay serve MODEL` takes the options of `vllm serve`, of its current and its older versions: those that mean the same
here work as they are, others become ours, some have no effect, which the log says at the start, and some are refused with
one sentence that says what to use instead. Every other word is an option of `kvrelay up`. Names may be written with `_`,
and parts of JSON options as in `--compilation-config.mode 3`. This page is made from `kvrelay/up/vllm_options.py`.

Differences that no option shows: `kvrelay serve` listens on 127.0.0.1 unless `--host 0.0.0.0` is given, and starts a prefill
node and a decode node, which share a GPU if there is only one; `--prefill` and `--decode` set their numbers.
"""
_TABLES: dict[Does, tuple[str, str]] = {
    "becomes": ("Becomes", "what it becomes"),
    "ignored": ("Has no effect", "why"),
    "refused": ("Is refused", "instead"),
}
"""Title and second column of each table."""


def page() -> str:
    """The whole text."""
    short = {name: flag for flag, name in SHORT.items()}
    shown = {name: f"`--{name}`" + (f" (`{short[name]}`)" if name in short else "") for name in OPTIONS}
    parts = [
        _HEAD,
        "## Means the same",
        "",
        _joined([shown[name] for name, each in OPTIONS.items() if each.does == "same"]),
    ]
    for does, (title, head) in _TABLES.items():
        rows: defaultdict[str, list[str]] = defaultdict(list)
        for name, option in OPTIONS.items():
            if option.does == does:
                taken = f" other than {', '.join(option.neutral)}" if option.neutral else ""
                rows[option.says].append(shown[name] + taken)
        lines = [f"| {', '.join(names)} | {says} |" for says, names in rows.items()]
        parts += [f"\n## {title}", "", f"| option of vLLM | {head} |", "|---|---|", *lines]
    return "\n".join(parts) + "\n"


def _joined(names: list[str], width: int = 120) -> str:
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > width:
            lines.append("")
        lines[-1] += name + ", "
    return "\n".join(line.rstrip() for line in lines).rstrip(",") + "."


if __name__ == "__main__":
    print(page(), end="")
