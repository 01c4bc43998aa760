"""The files of deploy/: manifests fit Kubernetes' schemas, flags exist, pods drain, and tools that are here agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from penstock.cli import app
from tests.deploy.chart import evaluate, render, render_text
from tests.deploy.raycluster import RAY_CLUSTER

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/penstock"
SETS: dict[str, dict[str, Any]] = {
    "usual": {},
    "scaled": {
        "autoscaling": {"enabled": True, "maxReplicas": 9},
        "models": {"accessModes": ["ReadWriteMany"]},
        "strategy": {"type": "RollingUpdate"},
    },
    "gpu": {
        "model": "org/name",
        "args": ["--quantization=fp8", "--max-num-seqs=512"],
        "env": [{"name": "HF_ENDPOINT", "value": "http://mirror"}],
        "apiKeysSecret": "keys",
        "adminKeySecret": "admin",
        "hfTokenSecret": "hub",
        "allowedHosts": ["llm.example.com"],
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "models": {"existingClaim": "shared"},
        "shutdownTimeout": 300,
    },
}


def by_kind(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in documents}


def flags_of_serve() -> set[str]:
    command: Any = typer.main.get_command(app)
    return {name for param in command.commands["serve"].params for name in param.opts}


def check_flags(arguments: list[str]) -> None:
    known = flags_of_serve()
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.partition("=")[0] in known, argument


@pytest.mark.parametrize("name", SETS)
def test_manifests_fit_the_schemas(name: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="install kubernetes-validate for Kubernetes' schemas")
    documents = render(CHART, SETS[name])
    for document in documents:
        schemas.validate(document, schemas.latest_version(), strict=True)
    broken = json.loads(json.dumps(by_kind(documents)["Deployment"]).replace('"containerPort"', '"containerport"'))
    with pytest.raises(schemas.ValidationError):
        schemas.validate(broken, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("name", SETS)
def test_pods_drain_and_are_confined(name: str) -> None:
    kinds = by_kind(render(CHART, SETS[name]))
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = container["args"]
    check_flags(args)
    timeout = next(int(arg.partition("=")[2]) for arg in args if arg.startswith("--shutdown-timeout"))
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= timeout + wait + 5
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    writable = tuple(mounted.values())
    for variable in container["env"]:
        if str(variable.get("value", "")).startswith("/"):
            assert variable["value"].startswith(writable), variable  # the rest of the root is read-only
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == kinds["Deployment"]["spec"]["selector"]["matchLabels"] == kinds["Service"]["spec"]["selector"]


def test_values_reach_the_manifests() -> None:
    scaled, gpu = (by_kind(render(CHART, SETS[name])) for name in ("scaled", "gpu"))
    assert "replicas" not in scaled["Deployment"]["spec"]  # else each upgrade would undo the autoscaler's count
    scaler = scaled["HorizontalPodAutoscaler"]["spec"]
    assert (
        scaler["maxReplicas"] == 9 and scaler["metrics"][0]["pods"]["metric"]["name"] == "penstock_num_requests_waiting"
    )
    assert "PersistentVolumeClaim" not in gpu and "HorizontalPodAutoscaler" not in gpu
    container = gpu["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][0] == "org/name" and container["args"][-2:] == SETS["gpu"]["args"]
    assert "--allowed-hosts=llm.example.com" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    names = {variable["name"] for variable in container["env"]}
    assert names >= {"PENSTOCK_API_KEYS", "PENSTOCK_ADMIN_KEY", "HF_TOKEN", "HF_ENDPOINT"}
    # with keys an annotation could not name the admin's; a volume of one node has one node's pods
    assert "annotations" not in gpu["Deployment"]["spec"]["template"]["metadata"]
    assert scaled["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] == "/metrics"
    kinds = [by_kind(render(CHART, SETS[name]))["Deployment"]["spec"]["strategy"]["type"] for name in SETS]
    assert kinds == ["Recreate", "RollingUpdate", "Recreate"]


@pytest.mark.parametrize("name", SETS)
def test_helm_renders_the_same(name: str, tmp_path: Path) -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(SETS[name]))
    command = [helm, "template", "llm", str(CHART), "--namespace", "models", "--values", str(tmp_path / "values.yaml")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    theirs = [document for document in yaml.safe_load_all(text) if document]
    assert by_kind(theirs) == by_kind(render(CHART, SETS[name]))


def test_helm_lints_the_chart() -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout + done.stderr


def test_the_renderer() -> None:
    scope = {"Values": {"a": {"b": "x y"}, "none": [], "list": [1, 2], "yes": True}}
    text = "a:\n{{- if .Values.none }}\n no\n{{- else }}\n b: {{ .Values.a.b | quote }}\n{{- end }}\n"
    assert render_text(text, scope) == 'a:\n b: "x y"\n'
    assert render_text("{{- range .Values.list }}\n- {{ . }}{{- end }}", scope) == "\n- 1\n- 2"
    assert evaluate('printf "%s-%s" .Values.yes 3', scope, scope) == "True-3"
    with pytest.raises(AssertionError, match="does not know"):
        render_text("{{ include thing }}", scope)


def test_the_runtime_of_kserve() -> None:
    runtime = yaml.safe_load((DEPLOY / "kserve.yaml").read_text())
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ClusterServingRuntime")
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"  # KServe looks for this name
    check_flags(container["args"])
    schemas = pytest.importorskip("kubernetes_validate", reason="install kubernetes-validate for Kubernetes' schemas")
    spec = {"containers": [container], "volumes": runtime["spec"]["volumes"]}  # the runtime's own is a custom resource
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "penstock"}, "spec": spec}
    schemas.validate(pod, schemas.latest_version(), strict=True)


def test_the_ranks_of_two_machines() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "ranks.yaml").read_text()))
    found = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in documents}
    stateful = found["StatefulSet", "penstock-ranks"]
    (container,) = stateful["template"]["spec"]["containers"]
    check_flags(container["args"])
    assert f"--nnodes={stateful['replicas']}" in container["args"]
    assert f"--master-addr=penstock-ranks-0.{stateful['serviceName']}" in container["args"]
    assert stateful["podManagementPolicy"] == "Parallel"  # pod 0 is ready once the others have come
    headless = found["Service", stateful["serviceName"]]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
    schemas = pytest.importorskip("kubernetes_validate", reason="install kubernetes-validate for Kubernetes' schemas")
    for document in documents:
        schemas.validate(document, schemas.latest_version(), strict=True)


def find_kuberay() -> dict[str, dict[str, Any]]:
    return by_kind(list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())))


def test_the_ray_cluster_has_a_machine_for_each_rank() -> None:
    kinds = find_kuberay()
    cluster = kinds["RayCluster"]
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    (container,) = head["template"]["spec"]["containers"]
    (worker,) = workers["template"]["spec"]["containers"]
    script = " ".join(container["args"]).replace("\\\n", " ")
    command = re.search(r"penstock serve (.*) &", script)
    assert command is not None
    check_flags(command[1].split())
    flags = dict(one.split("=") for one in command[1].split()[1:])
    assert int(flags["--pipeline-parallel-size"]) == 1 + workers["replicas"] == 1 + workers["maxReplicas"]
    assert flags["--threads"] == worker["resources"]["limits"]["cpu"], "a worker has room for one rank"
    assert head["template"]["spec"]["terminationGracePeriodSeconds"] > int(flags["--shutdown-timeout"])
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert "$KUBERAY_GEN_RAY_START_CMD" in script and "$KUBERAY_GEN_RAY_START_CMD" in worker["args"][0]
    for pod in (container, worker):  # else KubeRay adds probes that need wget and Ray's dashboard
        assert pod["livenessProbe"] and pod["readinessProbe"]
        assert "PENSTOCK_DISTRIBUTED_SECRET" in {variable["name"] for variable in pod["env"]}
    assert workers["rayStartParams"]["node-manager-port"] == str(worker["livenessProbe"]["tcpSocket"]["port"])
    assert kinds["Service"]["spec"]["selector"] == {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
    }


def test_the_ray_cluster_fits_the_schemas() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="install kubernetes-validate for Kubernetes' schemas")
    import jsonschema

    kinds = find_kuberay()
    cluster = kinds.pop("RayCluster")
    for document in kinds.values():
        schemas.validate(document, schemas.latest_version(), strict=True)
    jsonschema.validate(cluster, RAY_CLUSTER)
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        schemas.validate(pod, schemas.latest_version(), strict=True)
    for name in ("template", "groupName", "minReplicas", "maxReplicas"):
        broken = json.loads(json.dumps(cluster))
        del broken["spec"]["workerGroupSpecs"][0][name]
        with pytest.raises(jsonschema.ValidationError, match=name):
            jsonschema.validate(broken, RAY_CLUSTER)
    broken = json.loads(json.dumps(cluster).replace('"rayStartParams"', '"rayStartParameters"'))
    with pytest.raises(jsonschema.ValidationError, match="rayStartParameters"):
        jsonschema.validate(broken, RAY_CLUSTER)


def test_the_compose_file(tmp_path: Path) -> None:
    described = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in described["services"].items():
        check_flags(service["command"])
        assert (DEPLOY.parent / service["build"]["dockerfile"]).is_file(), name
        grace_s, own_s = int(service["stop_grace_period"][:-1]), int(service["command"][-1])
        assert grace_s > own_s and service["read_only"]
    compose = shutil.which("docker-compose")
    command = [compose] if compose else ["docker", "compose"]
    try:
        subprocess.run([*command, "version"], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("docker compose is not installed")
    environment = {"PENSTOCK_API_KEYS": "key", "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "penstock.service").read_text()
    start = re.search(r"^ExecStart=(.*)$", text, re.M)
    timeout = re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert start is not None and timeout is not None
    check_flags(start[1].split())
    assert int(timeout[1]) > int(start[1].split()[-1])
    given = dict(re.findall(r"(\w+)=(/\S+)", " ".join(re.findall(r"^Environment=(.*)$", text, re.M))))
    assert given.keys() >= {"HOME", "HF_HOME", "PENSTOCK_HOME", "TRITON_CACHE_DIR"}
    assert all(path.startswith("/var/lib/penstock") for path in given.values())  # the rest is read-only
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "penstock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", str(program)))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if "penstock.service" in line]
    assert not complaints, "\n".join(complaints)
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=nonsense"))
    broken = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    assert "nonsense" in broken.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_images_run_as_another_user(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert "\nUSER 10001\n" in text and "--uid 10001" in text and "STOPSIGNAL SIGTERM" in text
    assert "PENSTOCK_HOME=/models HF_HOME=/models/huggingface" in text
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.M)
    assert entry is not None
    check_flags(json.loads(entry[1]))
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (DEPLOY.parent / source).exists()
