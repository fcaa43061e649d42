"""A pipeline stage of a class of transformers: its own layers compute, the others are left out.

The class's forward runs as it is, with all layers in their places, because it chooses masks and rotary embeddings by a
layer's number. Runs on a rank's engine thread.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class StageDone(Exception):
    """Carries the hidden states of a stage's last layer out of the class's forward; the next stage takes over."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class SkippedLayer(nn.Module):
    """Takes the place of a layer of another stage."""

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        return hidden_states


class FirstLayer(nn.Module):
    """A stage's first layer, whose input is `received`, not what the class passes on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None
        return self.inner(received, *inputs, **options)


class LastLayer(nn.Module):
    """The last layer of a stage that is not the last one. Raises: StageDone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        output = self.inner(hidden_states, *inputs, **options)
        raise StageDone(output[0] if isinstance(output, tuple) else output)
