"""Runs a command against a router on stub nodes: `python -m support.stub_server COMMAND...`; the exit code is the command's.

In the command, `{url}` is replaced by the router's address, `{document}` by a file with its /openapi.json. The router wants
the API key `key`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import httpx
from support.stub_node import StubNode, make_model_folder, running_stack

from common.config.service_configs import RouterConfig


async def run(command: list[str]) -> int:
    """Run it; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model_folder(Path(folder) / "stub-model"))
        nodes = [StubNode(role, f"{role}-0", model, remembers=False) for role in ("prefill", "decode")]
        async with running_stack(RouterConfig(api_key="key"), *nodes) as stack:
            document = Path(folder) / "openapi.json"
            async with httpx.AsyncClient(headers={"authorization": "Bearer key"}) as http:
                document.write_bytes((await http.get(f"{stack.url}/openapi.json")).content)
            words = [word.replace("{url}", stack.url).replace("{document}", str(document)) for word in command]
            process = await asyncio.create_subprocess_exec(*words)
            return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
