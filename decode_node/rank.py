"""The process of a decode node's rank other than its leader: forked from it, or started by it as a program of its own.

As a program it settles how the process shares the machine before torch is imported; forked, it has that, and torch, from
its leader.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common.base.logs import configure
from common.base.process import lasting_imports, name_process, prepare_compute
from common.config.options import DecodeConfig
from common.node.ranks.arguments import rank_arguments


def run(fields: dict[str, Any], rank: int, leader: str) -> None:
    """Be this rank until the leader goes. `fields`: those of the node's configuration."""
    config = DecodeConfig(**fields)
    name_process(f"kvrelay-rank-{rank}")
    configure(config.log_level)
    prepare_compute(config.threads, nice=0)  # the leader's niceness is inherited
    with lasting_imports():
        from common.node.ranks.process import RankProcess
        from decode_node.rank_end import receiving_rank
        from decode_node.service import plan_of

    process = RankProcess(config, plan_of(config), rank, leader)
    process.run(small_batches=True, make_end=receiving_rank)


def main() -> None:
    """The rank that the command line names; its configuration comes by standard input."""
    arguments = rank_arguments()
    run(json.load(sys.stdin), arguments.rank, arguments.leader)


if __name__ == "__main__":
    main()
