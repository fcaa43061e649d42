"""`LLM`: generation from Python without a server, in this process or in a whole local cluster."""

from __future__ import annotations

import difflib
import gc
import itertools
import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.base.errors import BadRequest, ConfigError
from common.config.option_groups import CapacityOptions, DeviceOptions, GpuMemoryOptions, ModelOptions
from common.config.service_configs import DecodeConfig, UpConfig
from common.config.sources import resolve
from common.config.speculation import SpeculationOptions
from common.control.messages import Task
from common.model.hub import resolve_model
from common.model.pooling.task import find_task
from kvrelay.offline.engine import Engine, load_options
from kvrelay.offline.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    completion_output,
    prompt_logprobs,
)
from kvrelay.offline.pooling_engine import PoolingEngine
from kvrelay.offline.prompts import Conversation, Params, Prompt, PromptJob, chat_jobs, generate_jobs
from router.http.pooling.format import floats, token_vectors
from router.models.served_model import LoadOptions

_IN_PROCESS = {
    *(
        field.name
        for group in (ModelOptions, CapacityOptions, DeviceOptions, GpuMemoryOptions, SpeculationOptions)
        for field in fields(group)
    ),
    *("max_num_batched_tokens", "threads", "nice", "start_timeout_s", "tensor_parallel_size"),
}
"""Groups of options of `kvrelay decode` that have an effect in one process."""
_OWN_OF_CLUSTER = {"host", "port", "routers", "pid_file", "redis_url", "cluster", "api_key"}


class LLM:
    """A model. A context manager; `close` or the end of the process ends it, too.

    By default everything runs in this process, and nothing listens. With `prefill` or `decode`, that many nodes run in
    processes of their own, as with `kvrelay up`. Both return the same tokens, and those of the HTTP API.
    """

    def __init__(self, model: str = "demo", *, prefill: int = 0, decode: int = 0, **options: Any) -> None:
        """`model`: folder, GGUF file or hub name. `options`: those of `kvrelay decode` with `_` for `-`, and
        those of `kvrelay router` about the model's files; with `prefill` or `decode`, those of `kvrelay up`.

        Raises: ConfigError in one sentence for what cannot start.
        """
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._engine: Engine | PoolingEngine | None
        if prefill or decode:
            self._engine = _cluster_engine({**options, "model": model, "prefill": prefill, "decode": decode or 1})
        else:
            self._engine = _local_engine({**options, "model": model})
        self._pid = os.getpid()
        # Also at the interpreter's exit.
        self._end = weakref.finalize(self, _close_in, self._engine, self._pid)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue each prompt. `sampling_params`: for all prompts, or one for each. `use_tqdm`: show a progress bar, in a
        terminal only. Returns one output for each prompt, in their order.

        Raises: BadRequest for a wrong prompt, before anything runs.
        """
        engine = self._running()
        return self._run(engine, generate_jobs(engine.model, prompts, sampling_params), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template. `tools`: offered to the model, as over
        HTTP; its calls and its reasoning are part of the text. Otherwise as `generate`.
        """
        engine = self._running()
        options = {
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._run(engine, chat_jobs(engine.model, messages, sampling_params, options), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, by an embedding model. The options are fields of `/v1/embeddings`.

        Raises: BadRequest for a wrong prompt, before anything runs.
        """
        options = {"dimensions": dimensions, "normalize": normalize, "truncate_prompt_tokens": truncate_prompt_tokens}
        engine = self._pooling("embed")
        with self._lock:
            found = list(engine.vectors(prompts, options, per_token=False))
        return [EmbeddingRequestOutput(EmbeddingOutput(floats(vector)), ids) for ids, vector, _ in found]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput]:
        """The vectors of each prompt's tokens, by an embedding model. Otherwise as `embed`."""
        engine = self._pooling("embed")
        with self._lock:
            found = list(engine.vectors(prompts, {"truncate_prompt_tokens": truncate_prompt_tokens}, per_token=True))
        return [PoolingRequestOutput(PoolingOutput(token_vectors(each, width)), ids) for ids, each, width in found]

    def score(
        self, text_1: str | list[str], text_2: str | list[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """How well each pair fits: by a cross-encoder, or the cosine of two embeddings. One `text_1` is compared with each
        `text_2`. Raises: as `embed`.
        """
        engine = self._pooling("score", "embed")
        with self._lock:
            found = engine.scores(text_1, text_2, {"truncate_prompt_tokens": truncate_prompt_tokens})
        return [ScoringRequestOutput(ScoringOutput(each)) for each in found]

    def close(self) -> None:
        """Free the model, end the cluster. A second call does nothing."""
        self._end()
        if self._engine is not None:
            self._engine = None
            gc.collect()  # its parts refer to each other, and tensors do not make a collection more likely

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Engine:
        engine = self._open()
        if isinstance(engine, PoolingEngine):
            raise BadRequest(f"the model {engine.model.name!r} does not generate text", param="model")
        return engine

    def _pooling(self, *tasks: Task) -> PoolingEngine:
        engine = self._open()
        if not isinstance(engine, PoolingEngine) or engine.model.task not in tasks:
            raise BadRequest(f"the model {engine.model.name!r} does not {' or '.join(tasks)}", param="model")
        return engine

    def _open(self) -> Engine | PoolingEngine:
        engine = self._engine
        if engine is None or not self._end.alive:
            raise BadRequest("this LLM is closed")
        if os.getpid() != self._pid:  # its threads are not there
            raise BadRequest("this LLM was made before a fork, in another process: make one in this process")
        return engine

    def _run(self, engine: Engine, jobs: list[PromptJob], *, use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        generated = 0
        with self._lock, _progress_bar(wanted=use_tqdm) as progress, closing(engine.run(jobs)) as ended:
            task = progress.add_task("prompts", total=len(jobs), speed="")
            for index, answers in ended:
                job, tokenizer = jobs[index], engine.model.tokenizer
                prompt_ids = job.request.engine.prompt_ids.tolist()
                outputs[index] = RequestOutput(
                    request_id=str(next(self._ids)),
                    prompt=job.prompt,
                    prompt_token_ids=prompt_ids,
                    prompt_logprobs=prompt_logprobs(prompt_ids, answers[0].prompt_logprobs, tokenizer),
                    outputs=[completion_output(number, each, tokenizer) for number, each in enumerate(answers)],
                    num_cached_tokens=answers[0].cached_tokens,
                )
                generated += sum(len(answer.token_ids) for answer in answers)
                elapsed_s = progress.tasks[task].elapsed or 0.0
                speed = f"{generated / elapsed_s:.0f} tokens/s" if elapsed_s else ""
                progress.update(task, advance=1, speed=speed)
        return [outputs[index] for index in range(len(jobs))]


def _close_in(engine: Engine | PoolingEngine, pid: int) -> None:
    """Close the engine of process `pid`. A fork of it has neither the threads nor the cluster."""
    if os.getpid() == pid:
        engine.close()


def _local_engine(options: dict[str, Any]) -> Engine | PoolingEngine:
    of_files = {name: options[name] for name in set(LoadOptions._fields) & options.keys()}
    options = {name: value for name, value in options.items() if name == "tokenizer" or name not in of_files}
    files = load_options(resolve(UpConfig, flags=_texts(of_files), environ=os.environ, file=None).config)
    _check_known(options, _IN_PROCESS, "in one process")
    config = resolve(DecodeConfig, flags=_texts(options), environ=os.environ, file=None).config
    if config.num_ranks > 1:
        raise ConfigError("one process runs one rank: for more, start a cluster with LLM(..., decode=1, decode_tp=2)")
    path = resolve_model(config.model)
    if find_task(path, config.task) != "generate":
        return PoolingEngine(config, path, files)
    from kvrelay.offline.local_engine import LocalEngine

    return LocalEngine(config, files)


def _cluster_engine(options: dict[str, Any]) -> Engine:
    _check_known(options, {field.name for field in fields(UpConfig)} - _OWN_OF_CLUSTER, "of a local cluster")
    texts = _texts(options)
    config = resolve(UpConfig, flags=texts, environ=os.environ, file=None).config
    from kvrelay.offline.cluster_engine import ClusterEngine

    arguments = [part for name, text in texts.items() for part in ("--" + name.replace("_", "-"), text)]
    return ClusterEngine(config, arguments)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """The options as flags of the command line."""
    return {name: _text(value) for name, value in options.items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(value, default=str)
    if type(value).__module__ == "torch":  # a dtype; torch may not be imported here
        return str(value).removeprefix("torch.")
    return str(value)


def _check_known(options: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raises: ConfigError naming the first unknown option."""
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"LLM {where} has no option {name!r}{hint}")


def _progress_bar(*, wanted: bool) -> Progress:
    """A progress bar on standard error, shown only in a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    return Progress(*columns, console=console, disable=not (wanted and console.is_terminal))
