"""Renders the chart with the real helm, and walks the objects as a cluster would: who selects whom, what a container sees."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from support.paths import ROOT

KUBERNETES = ROOT / "compose/kubernetes"
CHART = KUBERNETES / "chart"
Values = Mapping[str, Any]
Object = dict[str, Any]


@functools.cache
def why_not() -> str | None:
    """Why helm cannot run here; None if it can."""
    try:
        done = subprocess.run([ROOT / "scripts/helm", "version"], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"helm cannot be had: {error}"
    return None if done.returncode == 0 else f"helm cannot be had: {done.stderr.strip()[-200:]}"


def helm(*words: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with these values."""
    command = [str(ROOT / "scripts/helm"), *words, *(["-f", "-"] if values is not None else [])]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)


def render(values: Values | None = None, release: str = "demo") -> list[Object]:
    """The objects that helm would install."""
    done = helm("template", release, str(CHART), values=values or {})
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(name of the object, pod template) of everything that makes pods."""
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        match each["kind"]:
            case "Deployment" | "StatefulSet":
                yield name, spec["template"]
            case "LeaderWorkerSet":
                yield from _group(name, spec)
            case "DisaggregatedSet":
                for role in spec["roles"]:
                    yield from _group(f"{name}-{role['name']}", role["spec"])
            case _:
                pass


def _group(name: str, spec: Object) -> Iterator[tuple[str, Object]]:
    template = spec["leaderWorkerTemplate"]
    yield name, template["leaderTemplate"]
    if template["size"] > 1:
        yield name, template["workerTemplate"]


def selectors(objects: list[Object]) -> Iterator[tuple[str, dict[str, str]]]:
    """(kind and name, labels) of everything that selects pods."""
    for each in objects:
        what, spec = f"{each['kind']} {each['metadata']['name']}", each.get("spec", {})
        match each["kind"]:
            case "Service":
                yield what, spec["selector"]
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget" | "InferencePool":
                yield what, spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield what, spec["podSelector"]["matchLabels"]
                for rule in spec["ingress"]:
                    for peer in rule.get("from", []):
                        if "podSelector" in peer:
                            yield f"{what} from", peer["podSelector"]["matchLabels"]
            case _:
                pass


def selects(labels: Mapping[str, str], pod: Object) -> bool:
    """Whether a selector with these labels selects the pods of a template."""
    return labels.items() <= pod["metadata"]["labels"].items()


def environment(container: Object, pod: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The environment of a container as the kubelet makes it. pod: values of `fieldRef`; secrets: values by their key."""
    environ: dict[str, str] = {}
    for entry in container["env"]:
        assert entry["name"] not in environ, f"{entry['name']} is set twice"
        match entry.get("valueFrom"):
            case {"fieldRef": {"fieldPath": path}}:
                value = pod[path]
            case {"secretKeyRef": {"key": key}}:
                value = secrets[key]
            case _:
                value = re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], entry["value"])
        environ[entry["name"]] = value
    return environ


def schema_of(kind: str) -> Any | None:
    """The schema of a kind that Kubernetes itself does not have, of the fields that the chart uses."""
    file = Path(ROOT / f"tests/support/data/kubernetes/{kind}.json")
    return json.loads(file.read_text()) if file.exists() else None
