"""Models whose files the router loads before a node registers them: a large tokenizer takes a second.

Runs on the router's event loop; files are loaded on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from common.control.messages import ModelInfo
from router.models import served_model
from router.models.served_model import LoadOptions, ServedModel

log = logging.getLogger(__name__)


class Preloads:
    """The models at these paths, loaded with these options from `start` on. Each is handed out once."""

    def __init__(self, paths: Sequence[str], options: LoadOptions) -> None:
        self._paths = paths
        self._options = options
        self._loads: dict[str, asyncio.Task[ServedModel]] = {}

    def start(self) -> None:
        """Begin to load the models."""
        for path in self._paths:
            load = asyncio.to_thread(served_model.load, path, None, self._options)
            self._loads[path] = asyncio.get_running_loop().create_task(load)

    async def take(self, info: ModelInfo, options: LoadOptions) -> ServedModel | None:
        """The model of a node, once it is loaded; None if no load of its files with these options succeeded."""
        load = self._loads.pop(info.path, None) if options == self._options else None
        if load is None:
            return None
        try:
            model = await load
        except Exception as error:  # it is loaded again, and what that raises is reported
            log.info("%s could not be loaded before its nodes came: %s", info.path, error)
            return None
        return model if info.tokenizer in (model.tokenizer_digest, "") else None

    def close(self) -> None:
        """Forget the models."""
        for load in self._loads.values():
            load.cancel()
        self._loads.clear()
