"""What somebody who records the packets between services, Redis and clients can read of a relayed request."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import httpx
import msgpack
import psutil
import pytest
from support.packet_capture import Flows, captured, why_not
from support.system import System, running_system

NO_CAPTURE = why_not()
PROMPT = "The harbour master wrote down every ship that came in before the storm, and every one that did not. " * 12
ARGS = ("--model", "demo", "--kv-transport", "zmq", "--local-prefill-tokens", "0")
CHUNK = 24
CHUNKS = 300


def ports_of(system: System) -> set[int]:
    """All ports at which processes of the cluster listen."""
    processes = psutil.Process(system.supervisor.pid).children(recursive=True)
    connections = [each for process in processes for each in process.net_connections("tcp")]
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def relayed(system: System, salt: str) -> tuple[Flows, dict[str, Any]]:
    """The packets of one request, whose KV goes from the prefill to the decode node, and its answer."""
    before = system.metric("kvrelay_relayed_bytes_total")
    with captured() as capture:
        body = {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "temperature": 0, "cache_salt": salt, "ignore_eos": True}
        answer = httpx.post(f"{system.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
        answer.raise_for_status()
        system.wait_whole()
    assert system.metric("kvrelay_relayed_bytes_total") > before
    return capture.flows(ports_of(system)), answer.json()["choices"][0]


def chunks_of_kv(flows: Flows) -> set[bytes]:
    """Pieces from all over the connection that carried most."""
    largest = max(flows.values(), key=len)
    rng = random.Random(1)
    starts = (rng.randrange(len(largest) - CHUNK) for _ in range(CHUNKS))
    return {piece for piece in (largest[at : at + CHUNK] for at in starts) if len(set(piece)) > CHUNK // 2}


def found(flows: Flows, needles: set[bytes]) -> set[bytes]:
    return {needle for needle in needles if any(needle in data for data in flows.values())}


def secrets_of(answer: dict[str, Any]) -> set[bytes]:
    """Text and token ids of prompt and answer, as they are written on links and to clients."""
    ids = answer["prompt_token_ids"]
    numbers = {b"".join(map(msgpack.packb, ids[at : at + 12])) for at in range(0, 60, 12)}
    return {PROMPT[:60].encode(), answer["text"][:12].encode(), *numbers}


@pytest.mark.thorough
@pytest.mark.skipif(NO_CAPTURE is not None, reason=str(NO_CAPTURE))
def test_with_tls_packets_hold_neither_kv_nor_text_nor_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, they do: that run also gives the bytes of KV to look for, which are the same in every run."""
    for name in ("plain", "tls"):
        (tmp_path / name).mkdir()
    with running_system(tmp_path / "plain", *ARGS) as system:
        system.wait_usable()
        first, answer = relayed(system, "a")
        again, _ = relayed(system, "b")
    kv, secrets = chunks_of_kv(first), secrets_of(answer)
    kv = found(again, kv)
    assert len(kv) > CHUNKS // 4, "most of what was sent is KV"
    assert found(first, secrets) == secrets

    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    https = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with running_system(tmp_path / "tls", *ARGS, "--tls", *https) as system:
        system.url = system.url.replace("http://", "https://")
        system.wait_usable()
        flows, same = relayed(system, "a")
    assert same["text"] == answer["text"]
    assert max(map(len, flows.values())) > 0.9 * max(map(len, first.values())), "KV came through the capture"
    assert not found(flows, kv | secrets)
