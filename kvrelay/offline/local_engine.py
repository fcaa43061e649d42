"""The engine in this process: the requests of one call, kept in flight on a `LocalNode`."""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Generator, Sequence
from dataclasses import replace

from common.base.errors import EngineError, KvRelayError, from_code
from common.base.process import prepare_compute
from common.config.service_configs import DecodeConfig
from common.control.identities import pack_ids
from common.control.messages import Abort, AttemptFailed, AttemptKey, DecodeRequest, Message, TokenBatch, TokenChunk
from common.kernels.native.build import build_library
from common.node.before_torch import COMPILE_S
from common.node.events import OutgoingMessage
from kvrelay.offline.answer_text import AnswerInProgress
from kvrelay.offline.engine import CLOSED
from kvrelay.offline.outputs import EngineAnswer
from kvrelay.offline.prompts import PromptJob
from router.http.openai.samples import samples
from router.models import served_model
from router.models.served_model import LoadOptions
from router.text.detokenizer import TokenPieces


class LocalEngine:
    """Tokenizer, scheduler and model in one process."""

    def __init__(self, config: DecodeConfig, options: LoadOptions) -> None:
        """Load the model. Raises: ConfigError in one sentence for what cannot start."""
        served = served_model.load(config.model, None, options)
        if config.device != "cuda":
            build_library(min(COMPILE_S, config.start_timeout_s / 2))
        prepare_compute(config.threads, config.nice)
        from kvrelay.offline.local_node import MAX_ACCEPTED, LocalNode

        self._most_in_flight = MAX_ACCEPTED
        self._news: queue.SimpleQueue[Message | BaseException | None] = queue.SimpleQueue()
        """None: closed."""
        self._node = LocalNode(config, self._deliver, self._news.put)
        info = self._node.model
        self.model = replace(served, name=info.name, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
        self._ids = itertools.count()

    def _deliver(self, sent: list[OutgoingMessage]) -> None:
        for each in sent:
            self._news.put(each.message)

    def run(self, jobs: Sequence[PromptJob]) -> Generator[tuple[int, list[EngineAnswer]]]:
        prompts = (_Prompt(index, job, self.model.tokenizer.pieces) for index, job in enumerate(jobs))
        first_waiting = next(prompts, None)
        running: _Running = {}
        room = self._most_in_flight
        try:
            while first_waiting is not None or running:
                while first_waiting is not None and len(first_waiting.samples) <= room:
                    room -= len(first_waiting.samples)
                    self._send(first_waiting, 0, running)
                    first_waiting = next(prompts, None)
                for ended in self._take_news(running):
                    room += len(ended.samples)
                    yield ended.index, ended.answers()
        finally:
            for key in running:
                self._node.send(Abort(key))

    def _send(self, prompt: _Prompt, number: int, running: _Running) -> None:
        key = AttemptKey(f"offline-{next(self._ids)}", 1)
        running[key] = prompt, number
        self._node.send(DecodeRequest(key, prompt.samples[number].engine, pack_ids(), None, math.inf))

    def _take_news(self, running: _Running) -> list[_Prompt]:
        """Wait for the next message. Samples that it ends leave `running`; returns the prompts that it completes."""
        match self._news.get():
            case TokenBatch(chunks):
                return [prompt for chunk in chunks if (prompt := self._take(chunk, running)) is not None]
            case AttemptFailed(key, code, message) if key in running:
                prompt, _ = running.pop(key)
                raise from_code(code, f"prompt {prompt.index}: {message}")
            case None:
                self._news.put(None)  # for calls that wait
                raise KvRelayError(CLOSED)
            case BaseException() as error:
                self._news.put(error)  # for later calls
                raise EngineError(f"the engine crashed: {error}") from error
            case _:
                return []

    def _take(self, chunk: TokenChunk, running: _Running) -> _Prompt | None:
        """The prompt whose last answer this chunk ends."""
        if chunk.key not in running:  # aborted
            return None
        prompt, number = running[chunk.key]
        progress = prompt.progress[number]
        if number == 0 and chunk.token_ids and chunk.start == 0:
            for other in range(1, len(prompt.samples)):
                self._send(prompt, other, running)
        if progress.push(chunk):
            self._node.send(Abort(chunk.key))
        if progress.answer is None:
            return None
        del running[chunk.key]
        return prompt if all(each.answer is not None for each in prompt.progress) else None

    def close(self) -> None:
        self._news.put(None)
        self._node.close()


class _Prompt:
    """One job's samples. The first one goes ahead: once its prompt is computed, the others find it in the prefix cache."""

    def __init__(self, index: int, job: PromptJob, pieces: TokenPieces) -> None:
        self.index = index
        self.samples = samples(job.request, job.params.n, ranked=False)
        self.progress = [AnswerInProgress(sample, pieces) for sample in self.samples]

    def answers(self) -> list[EngineAnswer]:
        return [each.answer for each in self.progress if each.answer is not None]


_Running = dict[AttemptKey, tuple[_Prompt, int]]
"""The samples in the engine: each one's prompt and number."""
