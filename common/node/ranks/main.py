"""The process of a rank other than the leader: forked from the leader's process, or started by it as this program.

As a program it sets threads before it imports torch; a forked process has inherited both.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

from common.base.errors import KvRelayError
from common.base.logs import configure
from common.base.process import ignore_terminal, lasting_imports, name_process, prepare_compute
from common.control.messages import Role
from common.node.roles import CONFIGS, load_role

log = logging.getLogger(__name__)


def run_rank(role_name: Role, fields: dict[str, Any], rank: int, leader: str) -> None:
    """Run rank `rank` until the leader ends. `fields`: the node's configuration; `leader`: the address that takes the
    rank's reports.

    Raises: SystemExit after a failure on purpose, which the leader was told of.
    """
    name_process(f"kvrelay-rank-{rank}")
    configure(fields["log_level"], fields["log_format"])
    prepare_compute(fields["threads"], nice=0)  # the leader's niceness is inherited
    with lasting_imports():
        from common.node.ranks.process import RankProcess

        role = load_role(role_name)
    config = CONFIGS[role_name](**fields)
    try:
        RankProcess(role, role.plan(config), rank, leader).run()
    except KvRelayError as error:
        log.error("rank %d ends: %s", rank, error)
        raise SystemExit(1) from None


def main() -> None:
    """Run the rank that the command line names; its configuration comes from standard input."""
    ignore_terminal()
    parser = argparse.ArgumentParser(description="One rank of a node; its leader starts it.")
    parser.add_argument("role", choices=["prefill", "decode"])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--leader", required=True, metavar="tcp://HOST:PORT")
    arguments = parser.parse_args()
    run_rank(arguments.role, json.load(sys.stdin), arguments.rank, arguments.leader)


if __name__ == "__main__":
    main()
