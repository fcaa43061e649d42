"""Which device a rank gets, what its dtype is there, and that a model built for a device leaves nothing behind on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generic_models import KINDS, config_of
from support.oracle import TINY, make_tiny, write_model
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from common.attention.base import AttentionMetadata
from common.attention.latent import LatentMatrices
from common.base.device import CPU, DeviceKind, default_dtype, rank_device, resolve_device
from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig
from common.model.choose import choose_model
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.fingerprint import fingerprint
from common.model.loader import load_model
from common.model.rank_model import HIDDEN
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights
from common.node.plan import plan_node, step_limits
from common.parallel.nccl import interface_name, make_nccl_group

META = torch.device("meta")


@dataclass
class NoAttention:
    """An attention that has only shapes."""

    def plan(self, metadata: AttentionMetadata) -> None:
        pass

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | LatentMatrices) -> Tensor:
        if isinstance(v, LatentMatrices):
            assert q.device.type == k.device.type == v.up.device.type == "meta"
            return v.values(q.new_empty(q.size(0), q.size(1), v.up.size(2)))
        assert q.device.type == k.device.type == v.device.type == "meta"
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    def for_graph(self, rows: int) -> NoAttention:
        return self


def tensors_of(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that `thing` holds, however deep."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from tensors_of(each, seen)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from tensors_of(each, seen)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from tensors_of(getattr(thing, field.name), seen)
    elif type(thing).__module__.startswith("common."):
        yield from tensors_of(vars(thing) if hasattr(thing, "__dict__") else [], seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("device")
    return {name: make_tiny(name, root / name) for name in TINY}


def load_on(device: torch.device, path: Path, dtype: str = "bfloat16") -> DecoderModel:
    config = load_model_config(path)
    return load_model(path, config, dtype=dtype, load_format="auto", seed=0, small_batches=True, device=device)


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_model_for_a_device_has_every_tensor_there_once_and_computes_there_alone(
    name: str, folder: dict[str, Path]
) -> None:
    model = load_on(META, folder[name])
    held = list(tensors_of(model, set()))
    assert len(held) > 10
    assert {tensor.device.type for tensor in held} == {"meta"}
    # One dtype, no float32 copies of matrices; norms and frequencies are small and float32.
    assert {tensor.dtype for tensor in held if tensor.dim() == 2 and min(tensor.shape) > 64} <= {torch.bfloat16}
    rows = torch.zeros(5, dtype=torch.int64, device=META)
    hidden = model.forward(rows, rows, NoAttention())[HIDDEN]
    assert (hidden.device.type, hidden.dtype) == ("meta", torch.bfloat16)
    logits = model.logits(hidden)
    assert logits is not None
    assert (logits.device.type, logits.dtype, logits.size(0)) == ("meta", torch.float32, 5)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("gpt2", "mixtral") else pytest.mark.thorough) for kind in KINDS],
)
@torch.inference_mode()
def test_a_class_of_transformers_computes_on_a_device_without_reading_values(kind: str, tmp_path: Path) -> None:
    """Reading one waits for the device, and ends the capture of a CUDA graph."""
    path = write_model(config_of(kind), tmp_path)
    config = choose_model(path, "transformers")
    model = load_model(path, config, dtype="bfloat16", load_format="auto", seed=0, small_batches=True, device=META)
    rows, positions = (torch.zeros(3, dtype=torch.int64, device=META) for _ in range(2))
    for _ in range(3):
        hidden = model.forward(rows, positions, NoAttention())[HIDDEN]
        assert hidden.device.type == "meta"
        assert model.logits(hidden) is not None


def test_loading_for_a_device_keeps_one_tensor_at_a_time_in_host_memory(
    folder: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    read = CheckpointWeights.read
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def counted(
        self: CheckpointWeights, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None
    ) -> Tensor:
        nonlocal most
        tensor = read(self, name, shape, dtype, part)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(CheckpointWeights, "read", counted)
    load_on(META, folder["llama"])
    assert len(alive) > 10
    assert most == 1


def test_auto_is_the_cpu_where_there_is_no_gpu_and_cuda_is_refused_in_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda: PyTorch .* finds no GPU; --device cpu needs none"):
        resolve_device("cuda")


def test_each_rank_of_a_host_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device("cpu", 3, 4) == CPU
    monkeypatch.setattr("common.base.device.num_gpus", lambda: 2)
    assert [str(rank_device("cuda", rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    monkeypatch.setattr("common.base.device.num_gpus", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks of one node need a GPU each, this process sees 1"):
        rank_device("cuda", 0, 2)


@pytest.mark.parametrize(
    ("saved", "kind", "used"),
    [
        ("float32", "cpu", "float32"),
        ("float32", "cuda", "bfloat16"),
        ("float16", "cuda", "float16"),
        ("bfloat16", "cuda", "bfloat16"),
    ],
)
def test_auto_dtype_is_bfloat16_on_a_gpu_for_what_was_saved_in_float32(saved: str, kind: Any, used: str) -> None:
    assert default_dtype(saved, kind) == used


def test_dummy_weights_of_another_device_are_another_model(folder: dict[str, Path]) -> None:
    path = folder["llama"]
    config = load_model_config(path)
    marks = [fingerprint(path, config, "dummy", "float32", 0, where) for where in ("cpu", "GPU A", "GPU B")]
    assert len(set(marks)) == 3
    # Of files the bytes decide, wherever they are computed with.
    assert fingerprint(path, config, "auto", "float32", 0) == fingerprint(path, config, "auto", "float32", 0, "GPU A")


def test_kv_cache_may_be_of_another_dtype_than_the_model(folder: dict[str, Path]) -> None:
    model = str(folder["llama"])
    plans = [
        plan_node(PrefillConfig(model=model, dtype="float32", kv_cache_dtype=d)) for d in ("auto", "bfloat16", "fp8")
    ]
    assert [(plan.dtype, plan.layout.spec.groups[0].dtype) for plan in plans] == [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float8_e4m3"),
    ]


def test_nccl_is_refused_in_one_sentence_where_pytorch_lacks_it() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has NCCL")
    with pytest.raises(ConfigError, match="several ranks on GPUs need NCCL"):
        make_nccl_group(HashStore(), 0, [0, 1], "127.0.0.1", 1.0)


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_name("127.0.0.1") == "lo"
    assert interface_name("eth7") == "eth7"
    assert interface_name("192.0.2.77") == ""


def test_steps_are_larger_on_a_gpu_unless_somebody_says_otherwise() -> None:
    def tokens(config: NodeConfig, device: DeviceKind) -> int:
        return step_limits(config, device, 1, 128, None).max_num_batched_tokens

    assert [tokens(PrefillConfig(), each) for each in ("cpu", "cuda")] == [512, 8192]
    assert [tokens(DecodeConfig(), each) for each in ("cpu", "cuda")] == [256, 2048]
    assert tokens(DecodeConfig(max_num_batched_tokens=7), "cuda") == 7
