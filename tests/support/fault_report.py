"""Writes the results of the fault matrix into its part of docs/faults.md:
`python tests/support/fault_report.py RESULTS.jsonl OUT.md`. With FAULT_TLS=1 that is the part about certificates.

For a cell that ran more than once, the last result is shown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from support.fault_cells import CUT_S, STOP_S, Fault, Moment, Target
from support.fault_run import read_results
from support.fault_services import TLS
from support.fault_streams import STREAMS

_TITLE, _TITLE_TLS = "# The fault matrix", "# The fault matrix with certificates"
_HEAD_TLS = """
Made by `scripts/test-faults --tls`: the same cells, with a certificate for each service (`--tls-dir`), so that control
links use TLS, KV over ZMQ and links between ranks are sealed, and records in Redis are signed. Ranks of one node on two
hosts add their parts up over gloo, which stays in clear (`--allow-plain-collectives`). Redis itself and the clients'
connections are as above. Three of the streams have a regular expression as grammar.
"""
_HEAD = f"""
Made by `make test-faults`, on the machine that it ran on. {STREAMS} streams run at once through two routers, two prefill
nodes (one of two ranks) and two decode nodes (one of two pipeline stages), every process on a host of its own (network
namespaces), in float32. Half of the streams are greedy, half sampled with seeds; among them are log-probabilities,
stop strings, stop tokens, penalties, chats, and an answer of a single token. Each cell is one run: at the moment of its
column the process of its row suffers the fault:

| fault | what is done |
|---|---|
| SIGKILL | the process is killed; it is started again when the streams are over |
| SIGSTOP 10 s | the process is suspended for {STOP_S:.0f} s, its connections stay open |
| restart | the process gets SIGTERM, and is started again at once under the same name and address |
| network cut | its host's packets are dropped both ways for {CUT_S:.0f} s, without any notice |

A cell is **ok** when all of this holds:

- every stream's text, token ids, log-probabilities (1e-4), usage and finish reason are those of a run without a fault;
- no client had to retry, except those of a router that ended: their connection breaks, they retry and get the same
  tokens (more of their prompt may be cached now);
- no key of a dead incarnation is left in Redis after its lease, no KV block is lost, and every load counter is zero;
- a node that was not killed keeps its incarnation.

A cell has one fault. After `--max-attempts` (3) consecutive attempts without a token a stream ends with an error, even if
they only waited in the queues of nodes that died. The router cannot tell whether a node had begun an attempt, and a request
that kills every node which computes it must not go from node to node.

The number is the longest pause of any of the {STREAMS} streams after the fault, in seconds; time in a queue counts.
"""


def render(results: dict[tuple[str, str, str], dict[str, Any]], *, tls: bool) -> str:
    """The results as a part of the page."""
    lines = [_TITLE_TLS + "\n" + _HEAD_TLS if tls else _TITLE + "\n" + _HEAD]
    lines += ["| process | fault | " + " | ".join(Moment) + " |", "|---|---|" + "---|" * len(Moment)]
    for target in Target:
        for fault in Fault:
            cells = [_cell(results.get((target, fault, moment))) for moment in Moment]
            lines.append(f"| {target} | {fault} | " + " | ".join(cells) + " |")
    ok = [result for result in results.values() if not result["problem"]]
    total = len(Target) * len(Fault) * len(Moment)
    hit = sum(1 for result in results.values() if result["retried"] or result["repeats"])
    lines += [
        "",
        f"{len(ok)} ok, {len(results) - len(ok)} failed, {total - len(results)} not run, of {total}. In {hit} cells "
        f"streams were placed again ({sum(result['retried'] for result in results.values()):.0f} further attempts in all);",
        "in the others the fault met no request that still needed the process, or only cost time.",
    ]
    failed = [result for result in results.values() if result["problem"]]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- {r['target']}, {r['fault']}, {r['moment']}: {_first(r['problem'])}" for r in failed]
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    return f"{'**failed**' if result['problem'] else 'ok'} {result['longest_gap_s']:.1f}"


def _first(problem: str) -> str:
    return problem.splitlines()[0][:300]


def replaced(page: str, part: str) -> str:
    """`page` with `part` in place of the part with the same title, or at its end."""
    title = part.partition("\n")[0]
    parts = re.split(r"^(?=# )", page, flags=re.MULTILINE)
    at = next((n for n, each in enumerate(parts) if each.partition("\n")[0] == title), None)
    if at is None:
        return f"{page}\n{part}"
    parts[at] = part if at == len(parts) - 1 else f"{part}\n"
    return "".join(parts)


def main(results: Path, page: Path) -> None:
    """Put the table into `page`; print it instead if cells are missing, since the page shows whole matrices only."""
    found = read_results(results)
    part = render(found, tls=TLS)
    if len(found) == len(Target) * len(Fault) * len(Moment):
        page.write_text(replaced(page.read_text(), part))
    else:
        print(f"{part}\n{page} stays as it is: not all cells have been run")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
