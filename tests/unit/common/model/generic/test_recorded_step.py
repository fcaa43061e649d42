"""Forward calls as recordings: the same numbers from other inputs, and refusals of what depends on values."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.generic_models import config_of
from support.oracle import write_model
from support.runner_cases import check, drive, make_runner, prompt
from torch import Tensor, nn

from common.model.generic.model import GenericModel
from common.model.generic.modules import as_one_operation
from common.model.generic.recorded_step import MAX_ROWS, CannotRecord, RecordedSteps, record


class Small(nn.Module):
    """Operations of many kinds: views, slices, lists, keywords, changes in place, and one opaque operation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.calls = 0

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x) * positions[:, None].float().cos()
        low, high = y.chunk(2, dim=-1)
        out = torch.zeros(x.size(0), 6, dtype=x.dtype)
        out[:, :3] = torch.cat([-high[..., :2], low[..., 2:]], dim=-1)
        out[:, 3:].add_(high)
        out = out.T.contiguous().mT
        return as_one_operation(self.opaque, out).max(dim=-1, keepdim=True)[0] + out

    def opaque(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)


def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 99, (rows,), generator=generator)


@torch.inference_mode()
def test_a_recording_computes_the_same_from_other_inputs_without_the_call() -> None:
    call = Small()
    output, replay = record(call, inputs(3, 1))
    assert torch.equal(output, call(*inputs(3, 1)))
    expected = call(*inputs(3, 2))
    assert call.calls == 3
    assert torch.equal(replay(*inputs(3, 2)), expected)
    assert call.calls == 3


@torch.inference_mode()
def test_a_view_that_is_made_again_shows_what_was_written_meanwhile() -> None:
    def call(x: Tensor) -> Tensor:
        y = x * 2
        before = y.unsqueeze(0)
        kept = before.clone()
        y.contiguous().add_(1)
        return kept - 3 * y.unsqueeze(0)

    _, replay = record(call, inputs(3, 1)[:1])
    (x,) = inputs(3, 2)[:1]
    assert torch.equal(replay(x), call(x))


@torch.inference_mode()
def test_each_number_of_rows_is_recorded_and_compared_before_it_is_used() -> None:
    call = Small()
    steps = RecordedSteps(call)
    for rows in (1, 2, 1, 2, 1, 2, 1):
        given = inputs(rows, rows)
        assert torch.equal(steps(*given), Small.forward(call, *given))
    assert call.calls == 4 + 7  # the steps' own, and those of the comparison
    steps(*inputs(MAX_ROWS + 1, 1))
    steps(*inputs(MAX_ROWS + 1, 1))
    assert call.calls == 4 + 7 + 2


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * x[0].item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: torch.where(x > 0)[0],
        lambda x: x.nonzero(),
        lambda x: x * int(x[0]),
    ],
)
def test_what_depends_on_values_is_not_recorded(read, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([3.0, -1.0, 2.0])
    with pytest.raises(CannotRecord):
        record(read, (x,))
    with caplog.at_level(logging.INFO):
        steps = RecordedSteps(read)
        assert all(torch.equal(steps(x), read(x)) for _ in range(4))
    assert caplog.text.count("are not recorded") == 1


def test_a_recording_that_misses_something_is_not_used() -> None:
    """A number that the call keeps between steps is in no tensor operation."""
    calls = 0

    def call(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    steps = RecordedSteps(call)
    assert [steps(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_decode_steps_are_recorded(kind: str, tmp_path: Path) -> None:
    folder = write_model(config_of(kind), tmp_path)
    runner = make_runner(folder, model_impl="transformers")
    prompts = [prompt(length, 250) for length in (5, 20, 33)]
    check(folder, prompts, drive(runner, prompts, 16, 12), 12)
    model = runner._model  # pyright: ignore[reportPrivateUsage]
    assert isinstance(model, GenericModel)
    assert model._recorded is not None  # pyright: ignore[reportPrivateUsage]
    assert len(prompts) in model._recorded._recorded  # pyright: ignore[reportPrivateUsage]
