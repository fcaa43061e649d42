"""The process of a rank other than the leader: forked from the leader's process, or started by it as this program.

As a program it sets threads before it imports torch; a forked process has inherited both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.base.errors import KvRelayError
from common.base.logs import configure
from common.base.process import ignore_terminal, lasting_imports, name_process, prepare_compute

if TYPE_CHECKING:
    from common.node.role import NodeRole

log = logging.getLogger(__name__)


def run_rank(load_role: Callable[[], NodeRole[Any]], fields: dict[str, Any], rank: int, leader: str) -> None:
    """Run rank `rank` until the leader ends. `fields`: the node's configuration; `leader`: the address that takes the
    rank's reports. `load_role` may import torch.

    Raises: SystemExit after a failure on purpose, which the leader was told of.
    """
    name_process(f"kvrelay-rank-{rank}")
    configure(fields["log_level"], fields["log_format"])
    prepare_compute(fields["threads"], nice=0)  # the leader's niceness is inherited
    with lasting_imports():
        from common.node.ranks.process import RankProcess

        role = load_role()
    config = role.config_type(**fields)
    try:
        RankProcess(role, role.plan(config), rank, leader).run()
    except KvRelayError as error:
        log.error("rank %d ends: %s", rank, error)
        raise SystemExit(1) from None


def main() -> None:
    """Run the rank that the command line names; its configuration comes from standard input."""
    ignore_terminal()
    parser = argparse.ArgumentParser(description="One rank of a node; its leader starts it.")
    parser.add_argument("role", metavar="MODULE", help="module of the node's role")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--leader", required=True, metavar="tcp://HOST:PORT")
    arguments = parser.parse_args()
    run_rank(
        lambda: importlib.import_module(arguments.role).ROLE, json.load(sys.stdin), arguments.rank, arguments.leader
    )


if __name__ == "__main__":
    main()
