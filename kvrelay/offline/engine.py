"""What `LLM` needs of an engine: `LocalEngine` in this process, or `ClusterEngine` over HTTP."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from common.config.service_configs import UpConfig
from kvrelay.offline.outputs import EngineAnswer
from kvrelay.offline.prompts import PromptJob
from router.models.served_model import LoadOptions, ServedModel

CLOSED = "the LLM was closed during this call"


class Engine(Protocol):
    """Runs jobs of one model. One thread at a time."""

    @property
    def model(self) -> ServedModel:
        """The model with the limits of this engine."""
        ...

    def run(self, jobs: Sequence[PromptJob]) -> Generator[tuple[int, list[EngineAnswer]]]:
        """Run the jobs and yield (index, its answers) in the order in which they end. Closing the generator ends the others.

        Raises: KvRelayError if any job fails.
        """
        ...

    def close(self) -> None:
        """End everything; a call that runs on another thread raises KvRelayError. Called once."""
        ...


def load_options(config: UpConfig) -> LoadOptions:
    """How the model's files are used."""
    return LoadOptions(**{name: getattr(config, name) for name in LoadOptions._fields})
