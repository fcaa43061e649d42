"""The engine in this process: the requests of one call, kept in flight on a `LocalNode`."""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Generator, Sequence
from dataclasses import replace

from common.base.errors import EngineError, from_code
from common.base.process import prepare_compute
from common.config.option_groups import GenerationConfig
from common.config.service_configs import DecodeConfig
from common.control.messages import Abort, AttemptFailed, AttemptKey, DecodeRequest, Message, TokenBatch
from common.kernels.native.build import build_library
from common.node.before_torch import COMPILE_S
from common.node.events import OutgoingMessage
from kvrelay.answer_text import AnswerInProgress
from kvrelay.outputs import Answer
from kvrelay.prompts import Job
from router import model_catalog
from router.model_catalog import LoadOptions, ServedModel


class LocalEngine:
    """Tokenizer, scheduler and model in one process."""

    def __init__(
        self, config: DecodeConfig, *, chat_template: str | None = None, generation_config: GenerationConfig = "auto"
    ) -> None:
        """Load the model. Raises: ConfigError in one sentence for what cannot start."""
        served = model_catalog.load(config.model, None, LoadOptions(chat_template, generation_config))
        if config.device != "cuda":
            build_library(min(COMPILE_S, config.start_timeout_s / 2))
        prepare_compute(config.threads, config.nice)
        from kvrelay.local_node import MAX_ACCEPTED, LocalNode

        self._most_in_flight = MAX_ACCEPTED
        self._news: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._node = LocalNode(config, self._deliver, self._news.put)
        info = self._node.model
        self._model = replace(served, name=info.name, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
        self._ids = itertools.count()

    def _deliver(self, sent: list[OutgoingMessage]) -> None:
        for each in sent:
            self._news.put(each.message)

    @property
    def model(self) -> ServedModel:
        return self._model

    def run(self, jobs: Sequence[Job]) -> Generator[tuple[int, Answer]]:
        waiting = enumerate(jobs)
        running: dict[AttemptKey, tuple[int, AnswerInProgress]] = {}
        try:
            while True:
                for index, job in itertools.islice(waiting, self._most_in_flight - len(running)):
                    key = AttemptKey(f"offline-{next(self._ids)}", 1)
                    running[key] = index, AnswerInProgress(job.request, self._model.tokenizer.pieces)
                    self._node.send(DecodeRequest(key, job.request.engine, [], None, math.inf))
                if not running:
                    return
                yield from self._take_news(running)
        finally:
            for key in running:
                self._node.send(Abort(key))

    def _take_news(self, running: dict[AttemptKey, tuple[int, AnswerInProgress]]) -> Generator[tuple[int, Answer]]:
        """Wait for the next message; yield the answers that it completes, and take them out of `running`."""
        match self._news.get():
            case TokenBatch(chunks):
                for chunk in chunks:
                    if chunk.key not in running:  # aborted
                        continue
                    index, progress = running[chunk.key]
                    if progress.push(chunk):
                        self._node.send(Abort(chunk.key))
                    if progress.answer is not None:
                        del running[chunk.key]
                        yield index, progress.answer
            case AttemptFailed(key, code, message) if key in running:
                index, _ = running.pop(key)
                raise from_code(code, f"prompt {index}: {message}")
            case BaseException() as error:
                self._news.put(error)  # for later calls
                raise EngineError(f"the engine crashed: {error}") from error
            case _:
                pass

    def close(self) -> None:
        self._node.close()
