"""The relay on a GPU: kernels against PyTorch, two processes on one GPU, and what happens when one of them dies."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.gpu.device import Gpu
from support.gpu_suite import sanitized
from support.relay_gpu import GpuPair, digest, random_storage, relay_bytes_per_s

from common.base.errors import PeerLost
from common.control.messages import AttemptKey
from common.engine.kv_transfer import AbortOrder
from common.kv.cuda_pages import cuda_library
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from kvtransfer.copy.cuda import CudaDevice, copy_by_index
from kvtransfer.copy.device import CopyRuns
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.wire import KVSlice

KV = KVLayout("m", KVSpec.uniform(4, 8, 128, "bfloat16"))
KEY = AttemptKey("r", 1)
LONG = 1_000_000_000
"""Clock cycles that a GPU sleeps: about half a second."""


def second_halves(base: torch.Tensor, blocks: int, run_bytes: int, ids: np.ndarray) -> CopyRuns:
    """Runs that are no neighbours: the second half of every block."""
    return CopyRuns(base, run_bytes, 2 * blocks * run_bytes, 2 * run_bytes, ids)


@pytest.mark.parametrize("run_bytes", [1, 12, 16, 4096, 16384, 16400, 40000])
def test_kernel_copies_what_pytorch_copies(run_bytes: int) -> None:
    """16-byte words, 4-byte words and bytes; runs shorter and longer than what a thread block copies at once."""
    assert cuda_library() is not None
    planes, blocks, rng = 6, 37, np.random.default_rng(run_bytes)
    device = CudaDevice(random_storage(KVLayout("m", KVSpec.uniform(1, 1, 16, "bfloat16")), 0, 1, 0))
    source = torch.randint(0, 256, (2 * planes * blocks * run_bytes,), dtype=torch.uint8, device="cuda")
    got, want = torch.zeros_like(source), torch.zeros_like(source)
    src = second_halves(source, blocks, run_bytes, rng.permutation(blocks)[:20])
    to = rng.permutation(blocks)[:20]
    torch.cuda.synchronize()
    device.copy(second_halves(got, blocks, run_bytes, to), src, planes, 20, run_bytes)
    device.wait()
    copy_by_index(second_halves(want, blocks, run_bytes, to), src, planes, 20, run_bytes)
    assert torch.equal(got, want)
    assert want.count_nonzero() > 0


@pytest.mark.parametrize("place", ["pinned", "pageable", "GPU"])
def test_gather_and_scatter_by_way_of_any_buffer(place: str) -> None:
    storages = random_storage(KV, 0, 32, 1), random_storage(KV, 0, 32, 2)
    devices = [CudaDevice(storage) for storage in storages]
    pieces = [KVSlice(0, 0, 4, 2, 7, 0, 20)]
    make: dict[str, Any] = {
        "pinned": devices[0].host_buffer,
        "pageable": lambda size: np.zeros(size, dtype=np.uint8),
        "GPU": devices[0].device_buffer,
    }
    buffer = make[place](sum(piece.size_bytes(KV.spec.unit_bytes) for piece in pieces))
    blocks = np.random.default_rng(0).permutation(32).astype(np.int64)[None]
    torch.cuda.synchronize()
    for device, storage, move in zip(devices, storages, ("gather_all", "scatter_all"), strict=True):
        mark = getattr(DeviceCopier(device, storage), move)(pieces, blocks, buffer)
        end = time.monotonic() + 30
        while not mark.done():
            assert time.monotonic() < end
    src, dst = (storage.groups[0].stacked[:, :, blocks[0, :20].tolist()] for storage in storages)
    as_bytes = torch.uint8
    assert torch.equal(dst[:, :, :, 2:7].view(as_bytes), src[:, :, :, 2:7].view(as_bytes))
    assert not torch.equal(dst[:, :, :, :2].view(as_bytes), src[:, :, :, :2].view(as_bytes))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[GpuPair]:
    made = GpuPair(KV, 256, getattr(request, "param", "cuda_ipc"))
    yield made
    made.close()


@pytest.mark.parametrize("pair", ["auto", "shm", "zmq"], indirect=True)
def test_relay_between_two_processes_of_one_gpu_is_exact(
    pair: GpuPair, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rng = np.random.default_rng(5)
    for number in range(3):
        key = AttemptKey(f"r{number}", 1)
        src, dst = (rng.permutation(256)[:200].tolist() for _ in range(2))
        pair.open(key, src, dst)
        pair.final(key, 200)
        pair.finish()
        assert pair.ask("digest", dst) == digest(pair.storage, src)
    wanted = request.node.callspec.params["pair"]
    assert f" over {'cuda_ipc' if wanted == 'auto' else wanted}: " in caplog.text


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_relay_between_a_gpu_and_a_processor_is_exact(
    devices: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = GpuPair(KV, 64, "auto", devices)
    try:
        pair.open(KEY, list(range(64)), list(range(63, -1, -1)))
        pair.final(KEY, 64)
        pair.finish()
        assert pair.ask("digest", list(range(63, -1, -1))) == digest(pair.storage, list(range(64)))
        assert " over shm: " in caplog.text
    finally:
        pair.close()


def test_nothing_leaves_before_the_compute_stream_has_got_there(pair: GpuPair) -> None:
    """The engine reports a layer right after its launch; the kernel that writes it is still to come."""
    blocks = list(range(100))
    pair.open(KEY, blocks, blocks)
    computed = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    pair.storage.groups[0].stacked[:, :, :100].fill_(
        3.0
    )  # a list of blocks would be copied to the GPU, which waits for it
    computed.record()
    pair.final(KEY, 100)
    assert not computed.query(), "reported while the GPU sleeps"
    pair.finish()
    assert pair.ask("digest", blocks) == digest(pair.storage, blocks)


def test_compute_stream_never_waits_for_the_relay(pair: GpuPair) -> None:
    """A kernel that is launched behind a report ends while the relay cannot: its receiver stands still."""
    blocks = list(range(200))
    pair.open(KEY, blocks, blocks)
    pair.child.kill()
    pair.final(KEY, 200)
    done = torch.cuda.Event()
    torch.ones(1, device="cuda").add_(1)
    done.record()
    end = time.monotonic() + 1
    while not done.query():
        assert time.monotonic() < end
    assert isinstance(pair.released().error, PeerLost)


def test_killed_receiver_gives_the_blocks_back_and_the_gpu_works_on(pair: GpuPair) -> None:
    pair.open(AttemptKey("first", 1), [0, 1], [0, 1])
    pair.final(AttemptKey("first", 1), 2)
    pair.finish()
    pair.open(KEY, list(range(256)), list(range(256)))
    pair.final(KEY, 255)
    pair.child.kill()
    pair.child.join(30)
    assert isinstance(pair.released().error, PeerLost)
    assert digest(pair.storage, [0]) == digest(pair.storage, [0])


_OWNER = """
import socket, sys, torch
from common.kv.cuda_pages import cuda_library
GPU = torch.device("cuda", 0)
memory = cuda_library().allocate(GPU, 4 << 20)
memory.tensor(GPU).fill_(77)
torch.cuda.synchronize()
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    socket.send_fds(s, [b"x"], [memory.export()])
    sys.stdin.read()
"""


def test_memory_of_a_killed_process_stays_whole_for_whoever_maps_it(tmp_path: Path) -> None:
    """What the driver promises of memory that has a descriptor; of `cudaMalloc`'s it promises nothing."""
    library, gpu = cuda_library(), torch.device("cuda", 0)
    assert library is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        listener.settimeout(120)
        child = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path / "s")], stdin=subprocess.PIPE)
        try:
            connected, _ = listener.accept()
            with connected:
                connected.settimeout(120)
                _, [fd], _, _ = socket.recv_fds(connected, 1, 1)
                seen = library.open(gpu, fd, 4 << 20).tensor(gpu)
                assert (seen == 77).all()
        finally:
            child.kill()
            child.communicate(timeout=30)
        torch.empty(8 << 20, dtype=torch.uint8, device=gpu).fill_(1)
        assert (seen == 77).all()


def test_abort_in_the_middle_ends_both_ends(pair: GpuPair) -> None:
    blocks = list(range(200))
    pair.open(KEY, blocks, blocks)
    torch.cuda._sleep(LONG // 10)
    pair.final(KEY, 199)
    pair.sender.apply(AbortOrder(KEY))
    assert pair.released().error is not None
    pair.ask("abort", KEY)
    kinds = [pair.ask("next event")[0]]
    if kinds[0] == "ReceiveFailed":
        kinds.append(pair.ask("next event")[0])
    assert kinds[-1] == "DestinationReleased"


def test_relay_between_two_gpus_is_exact() -> None:
    """NCCL refuses two ranks on one GPU: with one GPU this proves nothing, and says so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for transport in ("collective", "cuda_ipc"):
        pair = GpuPair(KV, 64, transport, ("cuda:0", "cuda:1"))
        try:
            pair.open(KEY, list(range(64)), list(range(64)))
            pair.final(KEY, 64)
            pair.finish()
            assert pair.ask("digest", list(range(64))) == digest(pair.storage, list(range(64)))
        finally:
            pair.close()


def test_relay_reaches_much_of_the_gpus_copy_rate() -> None:
    """Llama-3.1-8B shape. `scripts/gpu-bench` records the figure; here only that nothing is grossly wrong."""
    limit, reached = (
        Gpu("cuda").copy_bandwidth() / 2,  # each byte is read and written
        relay_bytes_per_s(KVLayout("m", KVSpec.uniform(32, 8, 128, "bfloat16")), 16384, 10),
    )
    print(f"relay {reached / 1e9:.0f} GB/s of {limit / 1e9:.0f} GB/s that the GPU copies: {reached / limit:.0%}")
    assert reached > 0.2 * limit


def test_sanitizer_finds_nothing_in_the_kernel() -> None:
    code, output = sanitized("-q", f"{__file__}::{test_kernel_copies_what_pytorch_copies.__name__}")
    assert code == 0, output[-4000:]
    assert "ERROR SUMMARY: 0 errors" in output
