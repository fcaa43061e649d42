"""Converts a checkpoint of `checkpoints.py` to OpenVINO's format, weights in bfloat16. Runs in OpenVINO's environment.

python to_openvino.py CHECKPOINT FOLDER
"""

from __future__ import annotations

import sys


def _main(checkpoint: str, target: str) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(checkpoint, target, task="text-generation-with-past", ov_config=OVConfig(dtype="bf16"))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
