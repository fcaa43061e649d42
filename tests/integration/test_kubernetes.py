"""The chart in real helm: its objects are valid, fit together, and their containers run here as a kubelet would run them.

No cluster runs here: what only a cluster's controllers do is not tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from support import helm
from support.helm import CHART, KUBERNETES, Object, render
from support.ports import ports_in_a_row
from support.redis_server import RedisServer
from support.system import wait_until

from common.config.fields import field_infos
from common.config.service_configs import DecodeConfig, PrefillConfig, RouterConfig
from common.config.sources import resolve

pytestmark = pytest.mark.skipif(helm.why_not() is not None, reason=f"{helm.why_not()}")

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/kvrelay", "tag": "1.2", "pullSecrets": [{"name": "pull"}]},
    "model": "/models/llama",
    "models": {"claim": "models"},
    "options": {"log-format": "json", "lease-s": 5},
    "secret": {"name": "mine"},
    "apiKeys": {"secret": "api-keys"},
    "tls": {"enabled": True},
    "redis": {"included": False, "urlSecret": "redis"},
    "router": {"httpsSecret": "web", "hostNames": ["llm.example"], "options": {"allowed-origins": "https://a.example"}},
    "prefill": {
        "hosts": 2,
        "tensorParallel": 4,
        "options": {"allow-plain-collectives": True},
        "autoscaling": {"enabled": True},
    },
    "decode": {"tensorParallel": 2, "pipelineParallel": 2, "autoscaling": {"enabled": True}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "inferencePool": {"enabled": True, "picker": {"name": "picker"}},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]},
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "one set for both roles": {"disaggregatedSet": True, "decode": {"hosts": 2, "tensorParallel": 2}},
    "the example": yaml.safe_load((KUBERNETES / "examples/two-hosts.yaml").read_text()),
}
CONFIGS = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
POD = {"metadata.name": "demo-kvrelay-decode-0", "status.podIP": "127.0.0.1"}
SECRETS = {"admin-token": "token", "redis-password": "password", "url": "redis://redis.example:6379/0"}


@pytest.fixture(scope="module", params=VALUES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(VALUES[request.param])


def containers(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """(role, pod template, container) of kvrelay's own services."""
    for _, pod in helm.pod_templates(objects):
        role = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if role in CONFIGS:
            yield role, pod, pod["spec"]["containers"][0]


def test_helm_finds_nothing_to_complain_about() -> None:
    done = helm.helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifests_are_those_of_the_chart() -> None:
    """compose/kubernetes/kvrelay.yaml; `scripts/kubernetes-manifests` writes it."""
    written = [each for each in yaml.safe_load_all((KUBERNETES / "kvrelay.yaml").read_text()) if each]
    assert written == render({"secret": {"name": "kvrelay"}}, release="kvrelay")


def test_objects_are_valid_for_the_api(objects: list[Object]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs the extra `kubernetes`")
    for each in objects:
        schema = helm.schema_of(each["kind"])
        if schema is None:
            for version in ("1.29", "1.37"):
                validator.validate(each, version, strict=True)
        else:
            jsonschema.validate(each, schema)
    # The API schemas know nothing of pods inside other kinds: check them as pods.
    for _, pod in helm.pod_templates(objects):
        labelled = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "pod"}}
        validator.validate(labelled, "1.37", strict=True)


@pytest.mark.parametrize("file", ["keda.yaml", "inference-gateway.yaml"])
def test_examples_name_objects_of_the_chart(file: str) -> None:
    names = {
        (each["kind"], each["metadata"]["name"])
        for each in render({"inferencePool": {"enabled": True, "picker": {"name": "picker"}}}, release="kvrelay")
    }
    for example in yaml.safe_load_all((KUBERNETES / "examples" / file).read_text()):
        match example["kind"]:
            case "ScaledObject":
                target = example["spec"]["scaleTargetRef"]
                assert (target["kind"], target["name"]) in names
                assert all(each["metadata"]["ignoreNullValues"] == "false" for each in example["spec"]["triggers"])
            case _:
                (rule,) = example["spec"]["rules"]
                assert all((ref["kind"], ref["name"]) in names for ref in rule["backendRefs"])


def test_every_selector_selects_pods(objects: list[Object]) -> None:
    pods = [pod for _, pod in helm.pod_templates(objects)]
    for what, labels in helm.selectors(objects):
        assert any(helm.selects(labels, pod) for pod in pods), what
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            assert helm.selects(each["spec"]["selector"]["matchLabels"], each["spec"]["template"])
    of_role = {role: pod for role, pod, _ in containers(objects)}
    for what, labels in helm.selectors(objects):  # and none of another role
        if what.startswith(("Service ", "PodDisruptionBudget ", "StatefulSet ", "Deployment ", "InferencePool ")):
            assert sum(helm.selects(labels, pod) for pod in of_role.values()) <= 1, what


def test_ports_agree(objects: list[Object]) -> None:
    """Services and policies name ports of the pods that they select; probes ask ports on which the container listens."""
    pods = [pod for _, pod in helm.pod_templates(objects)]
    for each in objects:
        if each["kind"] == "Service":
            named = [port["targetPort"] for port in each["spec"]["ports"]]
            labels = each["spec"]["selector"]
        elif each["kind"] == "NetworkPolicy":
            named = [port["port"] for rule in each["spec"]["ingress"] for port in rule.get("ports", [])]
            labels = each["spec"]["podSelector"]["matchLabels"]
        else:
            continue
        selected = [pod for pod in pods if helm.selects(labels, pod)]
        ports = {port["name"] for pod in selected for port in pod["spec"]["containers"][0].get("ports", [])}
        assert set(named) <= ports, each["metadata"]["name"]
    for role, _, container in containers(objects):
        if "ports" not in container:
            continue
        environ = helm.environment(container, POD, SECRETS)
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        first = "http" if role == "router" else "control"
        listens = {first: environ["KVRELAY_PORT"], "admin": environ["KVRELAY_ADMIN_PORT"]}
        listens |= {"kv": environ["KVRELAY_DATA_PORT"]} if role == "decode" else {}
        assert ports == listens
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            match container[probe]:
                case {"exec": {"command": [*_, address]}}:
                    assert address == f"tcp://127.0.0.1:{ports['control']}"
                case {"httpGet": {"port": port}}:
                    assert port == "http"
                case other:
                    pytest.fail(f"no probe: {other}")


def test_every_option_exists_and_is_taken(objects: list[Object]) -> None:
    for role, _, container in containers(objects):
        environ = helm.environment(container, POD, SECRETS)
        known = {f"KVRELAY_{name.upper()}" for name in field_infos(CONFIGS[role])}
        for_commands = {"KVRELAY_ADMIN_URL", "KVRELAY_CACHE"}
        assert {name for name in environ if name.startswith("KVRELAY_")} <= known | for_commands
        options = {name: value for name, value in environ.items() if name in known}
        flags = {"node_rank": "1", "master_addr": "leader"} if environ.get("KVRELAY_NNODES", "1") != "1" else {}
        assert resolve(CONFIGS[role], flags=flags, environ=options, file=None).config.cluster == "demo-kvrelay"


def test_volumes_and_secrets_exist(objects: list[Object]) -> None:
    made = {each["metadata"]["name"] for each in objects if each["kind"] == "Secret"}
    asked = {"mine", "api-keys", "redis", "web", "kvrelay-keys-router", "kvrelay-keys-prefill", "kvrelay-keys-decode"}
    for _, pod in helm.pod_templates(objects):
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == set(volumes)
        secrets = {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume}
        secrets |= {
            entry["valueFrom"]["secretKeyRef"]["name"]
            for entry in container["env"]
            if "secretKeyRef" in entry.get("valueFrom", {})
        }
        assert secrets <= made | asked


def test_pods_have_no_rights_and_time_to_drain(objects: list[Object]) -> None:
    for _, pod in helm.pod_templates(objects):
        assert pod["spec"]["enableServiceLinks"] is False
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        rights = pod["spec"]["containers"][0]["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["capabilities"] == {"drop": ["ALL"]}
    for _, pod, container in containers(objects):
        if "lifecycle" in container:
            assert "600" in " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
            assert pod["spec"]["terminationGracePeriodSeconds"] > 600


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"router": {"replicas": "two"}}, "at '/router/replicas': got string, want integer"),
        ({"routers": {"replicas": 2}}, "additional properties 'routers' not allowed"),
        ({"prefill": {"options": {"port": 5}}}, "options.port: the chart sets this option from a value of its own"),
        ({"redis": {"included": False}}, "redis.urlSecret names the Secret with the URL of an external Redis"),
        ({"secret": {"redisPassword": "a@b"}}, "at '/secret/redisPassword': 'a@b' does not match pattern"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.picker.name names the Service of the endpoint picker"),
        (
            {"disaggregatedSet": True, "decode": {"autoscaling": {"enabled": True}}},
            "autoscaling needs disaggregatedSet: false",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    done = helm.helm("template", "demo", str(CHART), values=values)
    assert done.returncode != 0
    assert complaint in done.stderr


def _run(container: Object, environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The container's process, as the image would start it."""
    command = container.get("command") or ["kvrelay", *container["args"]]
    return subprocess.Popen(command, env=environ, stdout=log.open("ab"), stderr=subprocess.STDOUT)


def _probe(container: Object, name: str, environ: dict[str, str]) -> bool:
    match container[name]:
        case {"exec": {"command": command}}:
            return subprocess.run(command, env=environ, capture_output=True, timeout=30).returncode == 0
        case {"httpGet": {"path": path}}:
            try:
                url = f"http://127.0.0.1:{environ['KVRELAY_PORT']}{path}"
                return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False
        case other:
            pytest.fail(f"no probe: {other}")


def test_containers_run_answer_probes_and_drain(tmp_path: Path) -> None:
    """One container of each role with its own command, environment, probes and preStop hook."""
    ports = ports_in_a_row(7)
    values = {
        "redis": {"included": False, "urlSecret": "redis"},
        "router": {"port": ports[0], "adminPort": ports[1]},
        "prefill": {"port": ports[2], "adminPort": ports[3], "options": {"kv-memory-gb": 0.05}},
        "decode": {"port": ports[4], "adminPort": ports[5], "dataPort": ports[6], "options": {"kv-memory-gb": 0.05}},
    }
    parts = {role: container for role, _, container in containers(render(values))}
    running: dict[str, subprocess.Popen[bytes]] = {}
    environs: dict[str, dict[str, str]] = {}
    with RedisServer() as redis:
        try:
            for role, container in parts.items():
                pod = {**POD, "metadata.name": f"demo-kvrelay-{role}-0"}
                environ = helm.environment(container, pod, {**SECRETS, "url": redis.url})
                # What pods have for themselves and these processes share: interfaces, names of Services, the cache.
                environ = {key: value.replace("0.0.0.0", "127.0.0.1") for key, value in environ.items()}
                environ["KVRELAY_ADMIN_URL"] = f"http://127.0.0.1:{ports[1]}"
                del environ["KVRELAY_CACHE"]
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
                environs[role] = {**os.environ, **environ, "PATH": path}
                running[role] = _run(container, environs[role], tmp_path / f"{role}.log")
            log = lambda: "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))  # noqa: E731
            for role, container in parts.items():
                wait_until(lambda: _probe(container, "startupProbe", environs[role]), 60, f"{role} starts", log)  # noqa: B023
            for role, container in parts.items():
                wait_until(lambda: _probe(container, "readinessProbe", environs[role]), 30, f"{role} is ready", log)  # noqa: B023
                assert _probe(container, "livenessProbe", environs[role])
            url = f"http://127.0.0.1:{ports[0]}/v1/completions"
            answer = httpx.post(
                url, json={"model": "demo", "prompt": "Hi", "max_tokens": 4}, timeout=30, trust_env=False
            )
            assert answer.status_code == 200, answer.text
            stop = {role: each["lifecycle"]["preStop"]["exec"]["command"] for role, each in parts.items()}
            done = subprocess.run(stop["decode"], env=environs["decode"], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
            assert not _probe(parts["router"], "readinessProbe", environs["router"])
            assert _probe(parts["router"], "livenessProbe", environs["router"])
            # In a pod the hook ends with its container; here it would wait for another router at this address.
            running["hook"] = subprocess.Popen(stop["router"], env=environs["router"], stderr=subprocess.DEVNULL)
            assert running["router"].wait(60) == 75
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait(30)


def test_values_that_differ_give_names_that_differ() -> None:
    """Two releases in one namespace share no object."""
    names = [{(each["kind"], each["metadata"]["name"]) for each in render({}, release)} for release in "ab"]
    assert not names[0] & names[1]
