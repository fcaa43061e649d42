"""The trace of a stream that survived kill -9, as a collector gets it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.system import running_system, wait_until

SECRET = "the prompt that no trace may hold"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any], list[bytes]]]:
    spans: list[Any] = []
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            bodies.append(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans, bodies
    finally:
        server.shutdown()


@pytest.mark.thorough
def test_kill_of_the_decode_node_is_a_failed_attempt_beside_the_one_that_went_on(tmp_path: Path) -> None:
    with collector() as (endpoint, spans, bodies):
        env = {"KVRELAY_OTLP_TRACES_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with running_system(tmp_path, "--model", "demo", "--decode", "2", env=env) as system:
            system.wait_usable(decode=2)
            body = {"model": "demo", "prompt": SECRET, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
            headers = {"traceparent": PARENT}
            url = f"{system.url}/v1/completions"
            with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as answer:
                lines = answer.iter_lines()
                for _ in range(20):
                    next(lines)
                node = answer.headers["x-kvrelay-decode-node"]
                system.kill("decode", index=int(node[-1]))
                assert "data: [DONE]" in list(lines)
            wait_until(lambda: any(span.name == "llm_request" for span in spans), 10, "the trace arrives")
            ours = [span for span in spans if span.trace_id.hex() == PARENT.split("-")[1]]
            by_id = {span.span_id: span for span in ours}
            attempts = [span for span in ours if span.name.startswith("attempt")]
            assert len(attempts) >= 2
            assert {by_id[span.parent_span_id].name for span in attempts} == {"llm_request"}
            first, *_, last = sorted(attempts, key=lambda span: span.start_time_unix_nano)
            assert (first.status.code, last.status.code) == (2, 0)
            assert any(event.name in ("node_lost", "leg_failed") for event in first.events)
        assert not any(SECRET.encode() in each for each in bodies)
