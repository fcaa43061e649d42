"""Puts the compiled native kernels into a wheel, if KVRELAY_PREBUILT=1 when it is built; else wheels are pure Python.

Needs a C++ compiler or, for a wheel that also runs on older Linux systems, the package `ziglang` (with CXX unset and no
compiler on the PATH) in the environment that builds the wheel.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = "KVRELAY_PREBUILT"


class NativeKernels(BuildHookInterface[Any]):
    """The build hook of wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises: CompileFailed, or RuntimeError without a compiler: what was asked for is not left out."""
        if version == "editable" or os.environ.get(PREBUILT, "") in ("", "0"):
            return
        sys.path.insert(0, self.root)
        from common.kernels.native.build import build_for_wheel

        self._work = tempfile.TemporaryDirectory(prefix="kvrelay-wheel-")
        library, tag = build_for_wheel(Path(self._work.name), sysconfig.get_platform().replace("-", "_"))
        build_data["force_include"][str(library)] = f"common/kernels/native/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
