"""Runs a command against a router on stub nodes: `python -m support.stub_server COMMAND...`; the exit code is the command's.

In the command, `{url}` is replaced by the router's address, `{document}` by a file with its /openapi.json. The router wants
the API key `key` and answers every request for text with `support.tool_model.CALLS`; the model `stub-embed` embeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import httpx
from support.redis_server import RedisServer
from support.router_bench import script_of
from support.stub_node import StubNode, make_model_folder, running_stack
from support.tool_model import CALLS, VOCAB_SIZE, make_tool_model
from tokenizers import Tokenizer

from common.config.service_configs import RouterConfig
from router.http.response_store import ResponseStore


async def run(command: list[str]) -> int:
    """Run it; returns its exit code."""
    with contextlib.ExitStack() as resources:
        folder = resources.enter_context(tempfile.TemporaryDirectory())
        model = make_tool_model(Path(folder) / "stub-model")
        answer = script_of(CALLS, Tokenizer.from_file(str(model / "tokenizer.json")))
        nodes = [
            StubNode(role, f"{role}-0", str(model), answer, vocab_size=VOCAB_SIZE, remembers=False)
            for role in ("prefill", "decode")
        ]
        pooled = str(make_model_folder(Path(folder) / "stub-embed"))
        nodes.append(
            StubNode(
                "prefill",
                "embed-0",
                pooled,
                task="embed",
                hidden_size=64,
                model_name="stub-embed",
                remembers=False,
            )
        )
        redis = resources.enter_context(RedisServer())
        store = ResponseStore(redis.url, "check", max_entries=100)
        async with running_stack(RouterConfig(api_key="key"), *nodes, responses=store) as stack:
            document = Path(folder) / "openapi.json"
            async with httpx.AsyncClient(headers={"authorization": "Bearer key"}) as http:
                document.write_bytes((await http.get(f"{stack.url}/openapi.json")).content)
            words = [word.replace("{url}", stack.url).replace("{document}", str(document)) for word in command]
            process = await asyncio.create_subprocess_exec(*words)
            return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
