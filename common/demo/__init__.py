"""The demo model: a few million parameters, trained by this package on text that it generates itself.

`train` and `corpus` are developer tools; serving reads only the folder `model/`.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH = Path(__file__).resolve().parent / "model"
"""Hugging Face-format folder of the trained model; ships inside the package."""
