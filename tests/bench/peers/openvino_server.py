"""A small HTTP server of streamed completions over OpenVINO GenAI. Runs in OpenVINO's environment.

    python openvino_server.py MODEL_FOLDER PORT KV_GB

An asyncio loop serves HTTP; the pipeline runs in a child process, because its steps hold the GIL. The server knows only
what the comparison's client sends: POST with a prompt of token ids, greedy, `ignore_eos`, streamed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def run_engine(folder: str, kv_gb: int, link: Connection) -> None:
    """The child process: takes (number, prompt, max_tokens), or (number, None, 0) to cancel; gives [(number, tokens)]."""
    import numpy
    import openvino
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = kv_gb
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduling, "CPU")
    running: dict[int, Any] = {}
    link.send([])
    while True:
        while not running or link.poll():
            number, prompt, max_tokens = link.recv()
            if prompt is not None:
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
                ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
                running[number] = pipeline.add_request(number, ids, config)
            elif number in running:
                running.pop(number).cancel()
        pipeline.step()
        fresh = [(number, _read(handle)) for number, handle in running.items()]
        link.send([(number, tokens) for number, tokens in fresh if tokens])
        running = {n: handle for n, handle in running.items() if handle.get_status().name == "RUNNING"}


def _read(handle: Any) -> list[int]:
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


class Server:
    """Serves HTTP, and passes requests and tokens to and from the engine's process."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._numbers = itertools.count(1)
        self._running: dict[int, asyncio.Queue[list[int]]] = {}
        self.ended = asyncio.Event()

    def take_tokens(self) -> None:
        """The engine has sent something, or has ended."""
        try:
            for number, tokens in self._link.recv():
                if number in self._running:
                    self._running[number].put_nowait(tokens)
        except EOFError:
            self.ended.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get"):
                body = b'{"data": [{"id": "bench"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                return
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            asked = json.loads(await reader.readexactly(length))
            writer.write(_HEAD)
            await self._stream(asked["prompt"], asked["max_tokens"], writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _stream(self, prompt: list[int], max_tokens: int, writer: asyncio.StreamWriter) -> None:
        number, count = next(self._numbers), 0
        arriving = self._running[number] = asyncio.Queue()
        try:
            self._link.send((number, prompt, max_tokens))
            while count < max_tokens and not writer.is_closing():
                tokens = await arriving.get()
                count += len(tokens)
                _write(writer, json.dumps({"choices": [{"token_ids": tokens}]}))
        finally:
            del self._running[number]
            if count < max_tokens:
                self._link.send((number, None, 0))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        _write(writer, json.dumps({"choices": [], "usage": usage}))
        _write(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _write(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def _main(folder: str, port: int, kv_gb: int) -> None:
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    engine = processes.Process(target=run_engine, args=(folder, kv_gb, theirs), daemon=True)
    engine.start()
    theirs.close()
    server = Server(ours)
    server.take_tokens()  # the engine's first message: it has loaded the model
    asyncio.get_running_loop().add_reader(ours.fileno(), server.take_tokens)
    async with await asyncio.start_server(server.serve, "127.0.0.1", port, limit=2**22):
        await server.ended.wait()
    sys.exit("the engine has ended")


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
