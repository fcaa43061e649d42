"""What a rank's process gets on its command line; torch-free, so that it can be read before torch is set up."""

from __future__ import annotations

import argparse


def rank_arguments() -> argparse.Namespace:
    """`rank`, its number in the node, and `leader`, where its leader takes reports."""
    parser = argparse.ArgumentParser(description="One rank of a node; its leader starts it.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--leader", required=True, metavar="tcp://HOST:PORT")
    return parser.parse_args()
