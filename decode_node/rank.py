"""The process of a decode node's rank other than its leader. Started by the leader; reads its configuration from
standard input. Settles how the process shares the machine before torch is imported.
"""

from __future__ import annotations

import json
import sys

from common.config import DecodeConfig
from common.logs import configure
from common.node.rank_arguments import rank_arguments
from common.process import lasting_imports, prepare_compute


def main() -> None:
    """Run until the leader goes."""
    arguments = rank_arguments()
    config = DecodeConfig(**json.load(sys.stdin))
    configure(config.log_level)
    prepare_compute(config.threads, nice=0)  # the leader's niceness is inherited
    with lasting_imports():
        from common.node.rank import RankProcess
        from decode_node.rank_end import ReceivingRank
        from decode_node.service import CODEC, blueprint_of

    process = RankProcess(config, blueprint_of(config), arguments.rank, arguments.leader, CODEC)
    process.run(small_batches=True, make_end=ReceivingRank)


if __name__ == "__main__":
    main()
