"""Profiles a node's process and collects facts about its GPUs, for the admin port."""

from __future__ import annotations

import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

from common.base import stack_sampler
from common.base.errors import Unavailable
from common.base.files import temporary_folder

_HEAD_BYTES = 65_536
_EVENTS, _LAST_FIELD = b'"traceEvents": [', b'"traceName": '


def node_profile(duration_s: float) -> bytes:
    """Record a Chrome trace of the next `duration_s` seconds. It blocks; steps go on, a little slower.

    The trace is not parsed, because that would stop the engine's thread for seconds. Raises: Unavailable if there is no disk
    space for it.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recorder = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    with (
        ThreadPoolExecutor(1, thread_name_prefix="profile") as thread,
        tempfile.TemporaryDirectory(dir=temporary_folder()) as folder,
    ):
        recorder.start()
        stacks = thread.submit(stack_sampler.record, duration_s).result()
        recorder.stop()
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        trace = path.read_bytes()
        if _LAST_FIELD not in trace[-_HEAD_BYTES:]:  # PyTorch does not report that it could not write
            raise Unavailable(f"the trace could not be written completely to {folder}: is its disk full?")
        return with_events(trace, stacks)


def with_events(trace: bytes, events: list[dict[str, Any]]) -> bytes:
    """Add events to a trace of PyTorch; their times are in microseconds since the epoch."""
    base = re.search(rb'"baseTimeNanoseconds":\s*(\d+)', trace[:_HEAD_BYTES] + trace[-_HEAD_BYTES:])
    base_us = int(base[1]) / 1e3 if base else 0.0
    moved = [{**event, "ts": event["ts"] - base_us} if "ts" in event else event for event in events]
    added = json.dumps(moved)[1:-1].encode()
    return trace.replace(_EVENTS, _EVENTS + added + (b"," if added else b""), 1)


def device_facts() -> dict[str, Any]:
    """The GPUs that this process sees: their memory, and which pairs cannot read each other's memory."""
    if not torch.cuda.is_initialized():
        return {"gpus": [], "gpus_apart": []}
    numbers = range(torch.cuda.device_count())
    free = [torch.cuda.mem_get_info(number) for number in numbers]
    names = [torch.cuda.get_device_name(number) for number in numbers]
    apart = [(a, b) for a in numbers for b in numbers if a < b and not torch.cuda.can_device_access_peer(a, b)]
    return {
        "gpus": [
            {"number": number, "name": names[number], "free_bytes": free[number][0], "total_bytes": free[number][1]}
            for number in numbers
        ],
        "gpus_apart": apart,
    }
