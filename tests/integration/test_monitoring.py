"""The dashboard and the alert rules of compose.monitoring.yaml: every query is about what routers export."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.paths import ROOT
from support.router_bench import LONG, Bench, play
from support.system import running_system

from router.metrics import Metrics
from router.node_metrics import NodeCollector
from router.nodes.breaker import Breakers

MONITORING = ROOT / "compose" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboards" / "kvrelay.json").read_text())
_WORD = re.compile(r"\b(?:vllm:|kvrelay_)\w+")


def queries() -> dict[str, str]:
    """Title or name -> query, of all panels and rules."""
    panels = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    }
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return panels | {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def test_every_metric_and_label_of_the_dashboard_and_the_rules_is_exported(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=4)
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            assert (await http.get("/v1/models/other")).status_code == 404
            text = (await http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        labels: dict[str, set[str]] = {}
        for sample in samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
        assert "unknown" not in {sample.labels.get("model_name") for sample in samples}
        # Families that have series only once something happened.
        labels |= {
            "kvrelay_http_errors_total": {"status"},
            "kvrelay_request_failed_total": {"code"},
            "kvrelay_relay_bytes_total": {"model_name", "node", "role", "transport"},
            "vllm:iteration_tokens_total_bucket": {"model_name", "node", "role", "le"},
            "kvrelay_redis_away": set(),
            "kvrelay_index_lag_seconds": set(),
            "kvrelay_index_nodes_silent": set(),
        }
        for name in ("kvrelay_relay_bytes_total", "vllm:iteration_tokens_total_bucket"):
            assert f"# TYPE {name.removesuffix('_bucket').removesuffix('_total')}" in text
        for title, query in queries().items():
            for metric in _WORD.findall(re.sub(r'"[^"]*"', '""', query)):
                assert metric in labels, f"{title}: no metric {metric}"
            used = set(re.findall(r"[{,]\s*(\w+)\s*[=!~]+", query))
            used |= {name.strip() for part in re.findall(r"by \(([^)]*)\)", query) for name in part.split(",")}
            known = {label for metric in _WORD.findall(query) for label in labels.get(metric, ())} | {"job", "instance"}
            assert used <= known | {""}, f"{title}: no label {used - known}"

    play(model_folder, scene)


def test_what_every_router_reports_about_a_node_counts_once() -> None:
    """Quotients and quantiles of such sums are those of one router."""
    metrics = Metrics()
    own = {family.name for family in metrics.registry.collect()} | {
        "kvrelay_breakers_opened",
        "kvrelay_unlisted_transitions",
    }
    metrics.registry.register(NodeCollector(list, Breakers(), list))
    of_nodes = {family.name for family in metrics.registry.collect()} - own
    assert "kvrelay_usable_nodes" in of_nodes
    for title, query in queries().items():
        if "/" in query or query.startswith("histogram_quantile"):
            continue
        bare = re.sub(r'"[^"]*"', '""', query)
        for found in _WORD.finditer(bare):
            if found[0].removesuffix("_total") in of_nodes:
                around = re.sub(r"(rate|increase)\($", "", bare[: found.start()])
                assert not re.search(r"\bsum( by \([^)]*\))? ?\($", around), f"{title}: {found[0]}, of every router"


def test_an_alert_is_about_routers_whose_name_has_no_address_any_more() -> None:
    """Prometheus then has no target, and no `up` that could be 0."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = [scraped["job_name"] for scraped in config["scrape_configs"] if "dns_sd_configs" in scraped]
    assert {f'absent(up{{job="{job}"}})' for job in jobs} <= set(queries().values())
    assert jobs


def test_a_role_whose_last_node_died_has_0_usable_nodes(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            line = 'kvrelay_usable_nodes{model_name="stub-model",role="%s"} %d.0'
            text = (await http.get("/metrics")).text
            assert line % ("decode", 1) in text
            assert line % ("prefill", 1) in text
            bench.stack.list_nodes(bench.prefill)
            await bench.decode.close()
            await bench.stack.usable(1, 0)
            text = (await http.get("/metrics")).text
            assert line % ("decode", 0) in text
            assert line % ("prefill", 1) in text

    play(model_folder, scene)


@contextlib.contextmanager
def prometheus(folder: Path, port: int, target: str) -> Iterator[str]:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [{"job_name": "kvrelay", "static_configs": [{"targets": [target]}]}]
    shutil.copy(MONITORING / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on this machine (Debian: prometheus)")
def test_prometheus_answers_every_query_about_a_live_cluster(tmp_path: Path, free_port: int) -> None:
    with running_system(tmp_path, "--model", "demo") as system:
        system.wait_usable()
        with prometheus(tmp_path, free_port, system.url.removeprefix("http://")) as url:
            until_s = time.monotonic() + 12
            while time.monotonic() < until_s:
                body = {"model": "demo", "prompt": LONG * 4, "max_tokens": 8, "temperature": 0}
                httpx.post(f"{system.url}/v1/completions", json=body, timeout=60).raise_for_status()
                httpx.get(f"{system.url}/v1/models/other")
            empty = []
            for title, query in queries().items():
                expr = query.replace("$__rate_interval", "10s").replace("$model", ".*")
                found = httpx.get(f"{url}/api/v1/query", params={"query": expr}).json()
                assert found["status"] == "success", (title, found)
                if not found["data"]["result"]:
                    empty.append(title)
            groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
            alerts = {rule["alert"] for group in groups for rule in group["rules"]}
            assert not [title for title in empty if title not in alerts and "Errors B" not in title], empty
            rules = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
            assert [rule for rule in rules if rule["state"] == "firing"] == []
