"""`kvrelay load run` as a command, against a router with stub nodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.stub_node import Stack, StubNode, make_model_folder, running_stack

from common.config.service_configs import RouterConfig


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("load") / "stub-model")


async def load(url: str, *args: str) -> tuple[int, str]:
    """Exit code and output of `kvrelay load run ARGS`."""
    command = [sys.executable, "-m", "kvrelay", "load", "run", "--url", url, *args]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ)
    )
    try:
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


def play(
    folder: Path, scene: Callable[[Stack, StubNode, StubNode], Awaitable[None]], config: dict[str, Any] | None = None
) -> None:
    async def main() -> None:
        prefill, decode = (
            StubNode(role, role[0] + "0", str(folder), cached_tokens=16) for role in ("prefill", "decode")
        )
        settings = {"policy": "least_load", "local_prefill_tokens": 0, **(config or {})}  # every prompt is relayed
        async with running_stack(RouterConfig(lease_s=3.0, **settings), prefill, decode) as stack:
            await scene(stack, prefill, decode)
            await stack.settled()

    asyncio.run(asyncio.wait_for(main(), 120))


SMALL = ("--prefix-tokens", "32", "--suffix-tokens", "16", "--output-tokens", "4")


def test_closed_loop_keeps_its_concurrency_and_counts_everything(model_folder: Path, tmp_path: Path) -> None:
    async def scene(stack: Stack, prefill: StubNode, decode: StubNode) -> None:
        file = tmp_path / "closed.json"
        args = ("--concurrency", "5", "--requests", "40", "--warmup", "3", "--prefixes", "2", "--json", str(file))
        code, output = await load(stack.url, *args, "--details", *SMALL)
        assert code == 0, output
        assert "40 of 40 succeeded" in output
        assert "\x1b" not in output
        result = json.loads(file.read_text())
        summary = result["summary"]
        assert (summary["requests"], summary["errors"], summary["output_tokens"]) == (40, {}, 160)
        assert summary["hit_rate"] == pytest.approx(16 / 48, rel=1e-3)
        assert summary["prefill"] == {"relayed": 40}
        assert summary["decode_nodes"] == {"d0": 40}
        assert [request["number"] for request in result["requests"]] == list(range(40))
        assert all(len(request["itl_s"]) == 3 for request in result["requests"])
        assert "api_key" not in result["config"]
        asked = [request.token_ids for request in prefill.requests()]
        assert len(asked) == 43
        assert {len(ids) for ids in asked} == {48}
        assert len({tuple(ids[:32]) for ids in asked}) == 2

    play(model_folder, scene)


def test_poisson_arrivals_on_two_processes_by_chat_with_objectives(model_folder: Path, tmp_path: Path) -> None:
    async def scene(stack: Stack, prefill: StubNode, decode: StubNode) -> None:
        file = tmp_path / "open.json"
        args = ("--rate", "60", "--duration", "1", "--chat", "--processes", "2", "--slo-ttft", "30", "--slo-tpot", "30")
        code, output = await load(stack.url, *args, "--json", str(file), "--api-key", "key-one", *SMALL)
        assert code == 0, output
        summary = json.loads(file.read_text())["summary"]
        assert 30 <= summary["requests"] <= 100
        assert summary["requests"] == len(decode.requests())
        assert summary["within_slo"] == 1.0
        assert "TTFT <= 30 s, TPOT <= 30 s" in output

    play(model_folder, scene, config={"api_key": "key-one"})


def test_trace_is_replayed_by_its_hashes(model_folder: Path, tmp_path: Path) -> None:
    rows = [
        (0, 1024, 64, [1, 2]),
        (100, 1500, 32, [1, 2, 3]),
        (200, 700, 96, [1, 4]),
        (300, 20_000, 32, list(range(40))),
    ]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))

    async def scene(stack: Stack, prefill: StubNode, decode: StubNode) -> None:
        code, output = await load(stack.url, "--trace", str(trace), "--scale", "32", "--rate-scale", "2")
        assert code == 0, output
        assert "3 of 3 succeeded" in output
        assert "1 request of the trace" in output
        by_length = {len(request.token_ids): request for request in decode.requests()}
        assert {length: request.request.sampling.max_tokens for length, request in by_length.items()} == {
            32: 2,
            46: 1,
            21: 3,
        }
        first, second, third = (by_length[length].token_ids for length in (32, 46, 21))
        assert first == second[:32]
        assert first[:16] == third[:16]
        assert first[16:21] != third[16:21]

    play(model_folder, scene)


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_run_reports_the_requests_so_far(model_folder: Path, processes: int) -> None:
    async def scene(stack: Stack, prefill: StubNode, decode: StubNode) -> None:
        command = [sys.executable, "-m", "kvrelay", "load", "run", "--url", stack.url, "--concurrency", "2"]
        process = await asyncio.create_subprocess_exec(
            *[*command, "--duration", "300", "--processes", str(processes), *SMALL],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # A test run in the background of a shell ignores the signal, and its children would as well.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            await decode.until(lambda: len(decode.requests()) > 100, timeout_s=60)
            if processes == 1:
                await stack_has_answered(stack)
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(30):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, output.decode()
        assert b"succeeded in" in output
        assert b"Traceback" not in output

    async def stack_has_answered(stack: Stack) -> None:
        async with asyncio.timeout(10):
            while not any(story["outcome"] == "finished" for story in stack.router.dispatcher.stories.recent(20)):
                await asyncio.sleep(0.01)

    play(model_folder, scene)


def test_too_many_errors_and_absent_servers_end_with_their_exit_codes(model_folder: Path) -> None:
    async def scene(stack: Stack, prefill: StubNode, decode: StubNode) -> None:
        decode.fail_with = ("engine_error", "scripted")
        code, output = await load(stack.url, "--concurrency", "2", "--requests", "4", *SMALL)
        assert code == 1, output
        # More than one kind where the router already avoids the node.
        assert sum(int(count) for count in re.findall(r"(\d+) x ", output)) == 4, output
        code, output = await load(stack.url, "--concurrency", "2", "--requests", "4", "--max-error-rate", "1", *SMALL)
        assert code == 0, output
        code, output = await load(stack.url, "--concurrency", "2", "--requests", "4", "--model", "other")
        assert code == 2, output
        assert "stub-model" in output
        code, output = await load(stack.url + "/nowhere", "--concurrency", "2", "--requests", "4")
        assert code == 3, output
        code, output = await load("http://127.0.0.1:1", "--concurrency", "2", "--requests", "4")
        assert code == 3, output
        assert "does not list models" in output
        code, output = await load(stack.url, "--requests", "4")
        assert code == 2, output

    play(model_folder, scene, config={"max_attempts": 1})
