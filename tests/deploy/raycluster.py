"""A RayCluster's fields, types and limits as of KubeRay 1.7's `ray.io/v1`. Its pod templates are Kubernetes' own."""

from __future__ import annotations

from typing import Any

STRING, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
WORDS = {"type": "object", "additionalProperties": STRING}
ANY = {"type": "object"}
POD = {"type": "object", "required": ["spec"]}


def _record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": fields}


HEAD = _record(
    ("template",),
    template=POD,
    rayStartParams=WORDS,
    labels=WORDS,
    resources=WORDS,
    serviceType=STRING,
    enableIngress=FLAG,
    ingressOptions=ANY,
    headService=ANY,
)
WORKERS = _record(
    ("groupName", "maxReplicas", "minReplicas", "template"),
    template=POD,
    groupName=STRING,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    priority=COUNT,
    idleTimeoutSeconds=COUNT,
    suspend=FLAG,
    rayStartParams=WORDS,
    labels=WORDS,
    resources=WORDS,
    scaleStrategy=ANY,
)
SPEC = _record(
    ("headGroupSpec",),
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
    rayVersion=STRING,
    suspend=FLAG,
    managedBy=STRING,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=ANY,
    authOptions=ANY,
    gcsFaultToleranceOptions=ANY,
    headServiceAnnotations=WORDS,
    historyServerOptions=ANY,
    networkPolicy=ANY,
    tlsOptions=ANY,
    upgradeStrategy=ANY,
)
RAY_CLUSTER = _record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=ANY,
    spec=SPEC,
)
