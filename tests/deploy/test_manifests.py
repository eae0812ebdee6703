"""The chart, rendered with Go's own templates, against Kubernetes' schemas and what we promise of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from csi_driver.webhook import PATH
from datacache.api import create_snapshot
from datacache.settings import Settings, load_settings
from datacache.web.access import HEALTH
from dataset_cli.manifests import name_of
from scripts import render_manifests as chart
from tests.csi_driver.dataset_api import dataset_schema
from tests.promises import promise

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
VERSION = "1.37"
SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object", "required": ["name", "namespace"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
                },
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                            "relabelings": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "sourceLabels": {"type": "array"},
                                        "targetLabel": {"type": "string"},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
"""What of the Prometheus operator's ServiceMonitor is used (its API reference, monitoring.coreos.com/v1)."""

PROMETHEUS_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PrometheusRule"},
        "metadata": {"type": "object", "required": ["name", "namespace"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "groups": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "rules": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "required": ["expr", "alert"],
                                    "properties": {
                                        "alert": {"type": "string"},
                                        "expr": {"type": "string"},
                                        "for": {"type": "string", "pattern": "^[0-9]+[smh]$"},
                                        "labels": {"additionalProperties": {"type": "string"}},
                                        "annotations": {"additionalProperties": {"type": "string"}},
                                    },
                                },
                            },
                        },
                    },
                }
            },
        },
    },
}
"""What of its PrometheusRule is used."""
_STRATEGY = {"type": "object", "additionalProperties": False, "properties": {"type": {"const": "RunAsAny"}}}
SCC = {
    "type": "object",
    "additionalProperties": False,
    # Required by its definition (openshift/api, security/v1).
    "required": [
        *("allowHostDirVolumePlugin", "allowHostIPC", "allowHostNetwork", "allowHostPID", "allowHostPorts"),
        *("allowPrivilegedContainer", "readOnlyRootFilesystem"),
    ],
    "properties": {
        "apiVersion": {"const": "security.openshift.io/v1"},
        "kind": {"const": "SecurityContextConstraints"},
        "metadata": {"type": "object", "required": ["name"], "not": {"required": ["namespace"]}},
        **{
            f"allow{name}": {"type": "boolean"}
            for name in ("HostDirVolumePlugin", "HostIPC", "HostNetwork", "HostPID", "HostPorts", "PrivilegedContainer")
        },
        "allowPrivilegeEscalation": {"type": "boolean"},
        "readOnlyRootFilesystem": {"type": "boolean"},
        **dict.fromkeys(("runAsUser", "seLinuxContext", "fsGroup", "supplementalGroups"), _STRATEGY),
        **{
            name: {"type": "array", "items": {"type": "string"}}
            for name in (
                *("allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities"),
                *("volumes", "users", "groups"),
            )
        },
    },
}
OTHER_SCHEMAS = {
    "ServiceMonitor": SERVICE_MONITOR,
    "PrometheusRule": PROMETHEUS_RULE,
    "SecurityContextConstraints": SCC,
}

VALUES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "sidecars": {"registrar": {"sidecar": True}},
    "no resizer": {"resizer": {"enabled": False}},
    "no labels of nodes": {"placement": {"labels": False}},
    "a webhook": {"placement": {"webhook": {"enabled": True, "caBundle": "TUlJ"}}},
    "a webhook with cert-manager": {
        "controller": {"replicas": 2},
        "placement": {"webhook": {"enabled": True, "port": 8443, "tlsSecret": "own-tls", "certificate": "own"}},
    },
    "monitoring": {
        "metrics": {
            "serviceMonitor": True,
            "rules": True,
            "runbooks": "https://docs.example/OPERATIONS.html",
            "dashboard": True,
            "labels": {"release": "prometheus"},
        }
    },
    "everything, from one registry": {
        "global": {"registry": "registry.lab:5000/mirror"},
        "registrar": {"sidecar": True},
        "ui": {"enabled": True, "hosts": ["data.example.org"]},
    },
    "what an operator sets": {
        "logLevel": "debug",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.53"]},
        "extraEnv": [
            {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
            {"name": "AWS_CA_BUNDLE", "valueFrom": {"configMapKeyRef": {"name": "ca", "key": "path"}}},
        ],
        "node": {
            "podLabels": {"team": "storage"},
            "podAnnotations": {"a.example/b": "c d"},
            "updateStrategy": {"type": "OnDelete"},
            "seLinuxOptions": {"type": "spc_t"},
        },
        "controller": {
            "replicas": 2,
            "podLabels": {"team": "storage"},
            "podAnnotations": {"a.example/b": "c d"},
            "updateStrategy": {"type": "Recreate"},
            "affinity": {"nodeAffinity": {}},
        },
        "ui": {
            "enabled": True,
            "hosts": ["data.example.org"],
            "podLabels": {"team": "storage"},
            "podAnnotations": {"a.example/b": "c d"},
        },
    },
    "node pools": {
        "settings": {"DATACACHE_SSD_BYTES": "200GB", "DATACACHE_ACCESS": "none"},
        "cluster": {"enabled": True},
        "node": {
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}}
        },
        "nodePools": [
            {"name": "cpu", "nodeSelector": {"pool": "cpu"}},
            {
                "name": "gpu",
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "home": "/mnt/nvme/datacache",
                "settings": {"DATACACHE_SSD_BYTES": "2TB", "DATACACHE_RAM_BYTES": "8GB"},
                "resources": {"daemon": {"limits": {"memory": "10Gi"}}},
                "updateStrategy": {"rollingUpdate": {"maxSurge": 2}},
                "podLabels": {"team": "gpu"},
            },
        ],
    },
    "OpenShift": {
        "openshift": {"enabled": True},
        "datasets": {"enabled": True},
        "ui": {"enabled": True, "hosts": ["data.example.org"]},
    },
    "a catalog of its own": {"mongodb": {"enabled": False}, "catalog": {"url": "mongodb://db.example/datacache"}},
    "a catalog with a password": {"mongodb": {"enabled": False}, "catalog": {"secret": "datacache-catalog"}},
    "MongoDB without a disk": {"mongodb": {"storage": ""}},
    "MongoDB on a class": {"mongodb": {"storageClass": "fast"}},
    "no credentials": {"stores": {"secret": ""}},
    "no classes": {"storageClasses": {"dataset": {"create": False}, "bucket": {"create": False}}},
    "no policies": {"networkPolicies": {"enabled": False}},
    "a cluster": {
        "cluster": {
            "enabled": True,
            "mode": "team-a-*=partition,share",
            "zone": "hall-2",
            "port": 7171,
            "tlsSecret": "lab-tls",
        }
    },
    "a cluster in zones": {"cluster": {"enabled": True}},
    "data sets": {
        "datasets": {"enabled": True, "sources": ["s3://faces/", "s3://lab/${pvc.namespace}/"], "tolerations": []}
    },
    "a page": {"ui": {"enabled": True, "hosts": ["data.example.org"]}},
    "a page behind a proxy": {
        "catalog": {"secret": "datacache-catalog"},
        "ui": {
            "enabled": True,
            "hosts": ["data.example.org", "data.lab"],
            "userHeader": "X-Auth-Request-User",
            "namespace": "team-a",
            "readOnly": False,
            "proxy": {"namespace": {"team": "web"}, "pods": {}},
            "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "data-tls", "annotations": {"a/b": "c"}},
        },
    },
    "digests": {
        "image": {"digest": f"sha256:{'0' * 64}"},
        "mongodb": {"image": f"mongo@sha256:{'0' * 64}"},
        "provisioner": {"image": f"registry.k8s.io/sig-storage/csi-provisioner:v6.3.0@sha256:{'0' * 64}"},
        "resizer": {"image": {"digest": f"sha256:{'1' * 64}"}},
    },
    "all of it": {
        "image": {"repository": "registry.example/datacache", "tag": "0.2.0", "pullSecrets": [{"name": "registry"}]},
        "settings": {"DATACACHE_SSD_BYTES": "500GB", "DATACACHE_ACCESS": "none"},
        "buckets": {"allowed": ["s3://runs/${pvc.namespace}/"]},
        "home": "/mnt/nvme/datacache",
        "kubeletDir": "/var/lib/k0s/kubelet",
        "controller": {"replicas": 2, "tolerations": [{"key": "a", "operator": "Equal", "value": "b"}]},
        "node": {"nodeSelector": {"gpu": "true"}, "affinity": {}},
        "storageClasses": {
            "dataset": {"parameters": {"warm": "true"}},
            "bucket": {"parameters": {"bucket": "s3://runs/${pvc.namespace}"}, "mountOptions": ["umask=002"]},
        },
    },
}


@cache
def rendered(name: str) -> list[dict[str, Any]]:
    values = chart.merge(chart.default_values(), VALUES[name])
    jsonschema.validate(values, values_schema())
    return [each for objects in chart.render(values, namespace="lab").values() for each in objects]


def values_schema() -> Any:
    return json.loads((chart.CHART / "values.schema.json").read_text(encoding="utf-8"))


def kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in rendered(name) if each["kind"] == kind]


@cache
def validate(text: str) -> None:
    each = json.loads(text)
    if each["kind"] == "DataSet":
        jsonschema.validate(each, dataset_schema())
    elif each["kind"] in OTHER_SCHEMAS:
        jsonschema.validate(each, OTHER_SCHEMAS[each["kind"]])
    else:
        kubernetes_validate.validate(each, VERSION, strict=True)


def pod_specs(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Pod":
            yield each["metadata"]["name"], spec
        elif each["kind"] == "CronJob":
            yield each["metadata"]["name"], spec["jobTemplate"]["spec"]["template"]["spec"]
        elif "template" in spec:
            yield each["metadata"]["name"], spec["template"]["spec"]


def examples(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def node_container(values: str, name: str) -> dict[str, Any]:
    [daemon_set] = kind(values, "DaemonSet")
    return next(each for each in daemon_set["spec"]["template"]["spec"]["containers"] if each["name"] == name)


def test_the_manifests_in_the_repository_are_what_the_chart_gives() -> None:
    expected = chart.manifests(chart.default_values())
    found = {str(path.relative_to(chart.OUT)): path.read_text(encoding="utf-8") for path in chart.OUT.rglob("*.yaml")}
    assert found == expected, "run: python scripts/render_manifests.py"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mongodb": {"enable": False}}, "mongodb: .*'enable' was unexpected"),
        ({"mongodb": {"enabled": False}}, "catalog.secret: .* non-empty"),
        ({"image": {"tag": 0.2}}, "image.tag: 0.2 is not of type 'string'"),
    ],
)
def test_values_rendered_without_helm_are_checked_as_by_helm(
    values: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "my.yaml"
    mine.write_text(yaml.safe_dump(values), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["render_manifests.py", "--values", str(mine), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=words):
        chart.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("values", VALUES)
def test_kubernetes_schemas_accept_every_object(values: str) -> None:
    objects = rendered(values)
    assert len(objects) > 8
    for each in objects:
        validate(json.dumps(each))
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_kubernetes_schemas_accept_every_example(path: Path) -> None:
    for each in examples(path):
        validate(json.dumps(each))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mongodb": {"enabled": False}},
        {"catalog": {"url": "mongodb://user:password@db.example/datacache"}},
        {"catalog": {"url": "sqlite:////tmp/catalog.db"}},
        {"image": {"tag": "latest"}},
        {"image": {"digest": "sha256:1234"}},
        {"mongodb": {"secret": ""}},
        {"networkPolicies": {"monitoring": {"team": 1}}},
        {"metrics": {"address": "all"}},
        {"provisioner": {"image": "registry.example/csi-provisioner"}},
        {"provisioner": {"image": {"digest": "sha256:12"}}},
        {"mongodb": {"image": {"tag": "latest"}}},
        {"global": {"registry": "registry.example/"}},
        {"logLevel": "loud"},
        {"extraEnv": [{"name": "DATACACHE_HOME", "value": "/elsewhere"}]},
        {"node": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 1}}}},
        {"node": {"name": "gpu"}},
        {"nodePools": [{"name": "gpu"}]},
        {"nodePools": [{"name": "GPU", "nodeSelector": {"pool": "gpu"}}]},
        {"nodePools": [{"name": "gpu", "nodeSelector": {"pool": "gpu"}, "cache": {}}]},
        {"settings": {"DATACACHE_LOG_LEVEL": "debug"}},
        {"openshift": True},
        {"settings": {"DATACACHE_HOME": "/elsewhere"}},
        {"settings": {"AWS_SECRET_ACCESS_KEY": "secret"}},
        {"settings": {"DATACACHE_CLUSTER_KEY": "anybody who lists releases reads it"}},
        {"cluster": {"keySecret": ""}},
        {"cluster": {"mode": "mirror"}},
        {"home": "relative"},
        {"nodes": {}},
        {"datasets": {"sources": ["faces"]}},
        {"datasets": {"deadlineSeconds": 1}},
        {"ui": {"enabled": True}},
        {"ui": {"enabled": True, "hosts": ["data.example.org:443"]}},
        {"ui": {"ingress": {"enabled": True}}},
        {"ui": {"proxy": {"namespace": {"team": 1}}}},
        {"ui": {"userHeader": "X-User: x"}},
        {"settings": {"DATACACHE_UI_USER_HEADER": "X-User"}},
    ],
)
def test_values_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(chart.merge(chart.default_values(), wrong), values_schema())


def test_the_schemas_patterns_are_such_as_helms_regular_expressions_understand() -> None:
    """Helm compiles them with Go's regexp (RE2), and refuses a chart with any other."""
    text = (chart.CHART / "values.schema.json").read_text(encoding="utf-8")
    patterns: list[str] = []

    def note(each: dict[str, Any]) -> dict[str, Any]:
        patterns.extend(filter(lambda value: isinstance(value, str), [each.get("pattern")]))
        patterns.extend(each.get("patternProperties", {}))
        return each

    json.loads(text, object_hook=note)
    assert len(patterns) > 10
    assert [each for each in patterns if re.search(r"\(\?(?!:)|\\[1-9]", each)] == [], "lookaround, or a reference back"


def test_values_of_an_older_chart_are_refused_with_the_way_out_and_documents_keep_clear_of_them() -> None:
    """`helm upgrade --reuse-values` gives a new chart the old one's defaults, and none of its own."""
    reused = chart.default_values()
    del (
        reused["cluster"],
        reused["ui"],
        reused["datasets"],
        reused["openshift"],
        reused["nodePools"],
        reused["global"],
        reused["dnsPolicy"],
    )
    del reused["logLevel"], reused["extraEnv"], reused["restartOnSecretChange"], reused["node"]["podLabels"]
    reused["provisioner"]["image"] = "registry.k8s.io/sig-storage/csi-provisioner:v6.2.0"
    del reused["networkPolicies"], reused["metrics"]["address"], reused["mongodb"]["secret"], reused["image"]["digest"]
    jsonschema.validate(reused, values_schema())  # which Helm does first, and whose words name no way out
    with pytest.raises(SystemExit, match="--reset-then-reuse-values"):
        chart.render_texts(reused)
    upgrades = re.findall(r"helm upgrade .*", (ROOT / "docs" / "KUBERNETES.md").read_text(encoding="utf-8"))
    assert upgrades
    assert all("--reset-then-reuse-values" in command or "--install" in command for command in upgrades)


def controller_role(values: str) -> dict[str, Any]:
    roles = kind(values, "ClusterRole")
    return next(each for each in roles if each["metadata"]["name"] == "datacache-controller")


def test_the_controller_may_do_this_in_the_cluster_and_nothing_else() -> None:
    role, [own] = controller_role("the defaults"), kind("the defaults", "Role")
    allowed = {
        f"{resource}.{group}" if group else resource: sorted(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {
        "persistentvolumeclaims": ["get", "list", "watch"],
        "persistentvolumeclaims/status": ["patch"],
        "persistentvolumes": ["create", "delete", "get", "list", "patch", "watch"],
        "storageclasses.storage.k8s.io": ["get", "list", "watch"],
        "events": ["create", "get", "patch"],
        "nodes": ["list", "patch"],
    }
    assert own["rules"] == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}
    ]
    without = [rule["resources"] for rule in controller_role("no resizer")["rules"]]
    assert ["persistentvolumeclaims/status"] not in without


def test_without_labels_the_controller_may_do_nothing_with_nodes() -> None:
    def arguments(values: str) -> list[str]:
        [controller] = [each for each in kind(values, "Deployment") if each["metadata"]["name"].endswith("-controller")]
        found: list[str] = controller["spec"]["template"]["spec"]["containers"][0]["args"]
        return found

    assert "--label-nodes" in arguments("the defaults")
    assert "--label-nodes" not in arguments("no labels of nodes")
    assert ["nodes"] not in [rule["resources"] for rule in controller_role("no labels of nodes")["rules"]]


@promise("No pod fails or waits for the webhook")
def test_the_webhook_is_asked_about_few_pods_for_a_short_time_and_may_be_away() -> None:
    assert kind("the defaults", "MutatingWebhookConfiguration") == []
    for values, port in (("a webhook", 9443), ("a webhook with cert-manager", 8443)):
        [configuration] = kind(values, "MutatingWebhookConfiguration")
        [webhook] = configuration["webhooks"]
        assert (webhook["failurePolicy"], webhook["timeoutSeconds"], webhook["sideEffects"]) == ("Ignore", 3, "None")
        [excluded] = webhook["namespaceSelector"]["matchExpressions"]
        assert excluded["operator"] == "NotIn"
        assert {"kube-system", "lab"} <= set(excluded["values"])
        assert "persistentVolumeClaim" in webhook["matchConditions"][0]["expression"]
        service = webhook["clientConfig"]["service"]
        [found] = [each for each in kind(values, "Service") if each["metadata"]["name"] == service["name"]]
        assert (found["spec"]["ports"][0]["port"], found["spec"]["ports"][0]["targetPort"]) == (service["port"], port)
        assert service["path"] == PATH
        [controller] = [each for each in kind(values, "Deployment") if each["metadata"]["name"].endswith("-controller")]
        pod = controller["spec"]["template"]
        assert found["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        driver = pod["spec"]["containers"][0]
        assert f"--webhook-port={port}" in driver["args"]
        [folder] = [each["mountPath"] for each in driver["volumeMounts"] if each["name"] == "webhook-tls"]
        assert f"--webhook-tls={folder}" in driver["args"]
        [secret] = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "webhook-tls"]
        assert secret["optional"] is True
        [policy] = [each for each in kind(values, "NetworkPolicy") if each["metadata"]["name"] == service["name"]]
        assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]
    assert webhook["clientConfig"].get("caBundle") is None
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "lab/own"}


def test_a_webhook_without_an_authority_is_refused() -> None:
    values = chart.merge(chart.default_values(), {"placement": {"webhook": {"enabled": True}}})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, values_schema())


def test_a_node_may_write_events_and_its_driver_alone_has_the_token() -> None:
    [daemon_set] = kind("the defaults", "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    [role] = [each for each in kind("the defaults", "ClusterRole") if each["metadata"]["name"] == "datacache-node"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}]
    bound = [
        (each["roleRef"]["name"], subject["name"])
        for each in kind("the defaults", "ClusterRoleBinding") + kind("the defaults", "RoleBinding")
        for subject in each["subjects"]
        if subject["name"] == spec["serviceAccountName"]
    ]
    assert bound == [("datacache-node", "datacache-node")]
    have = [c["name"] for c in spec["containers"] if "token" in {mount["name"] for mount in c["volumeMounts"]}]
    assert have == ["driver"]
    assert {each["automountServiceAccountToken"] for each in kind("the defaults", "ServiceAccount")} == {False}


@pytest.mark.parametrize("values", ["the defaults", "sidecars"])
def test_store_credentials_are_in_no_container_that_needs_none(values: str) -> None:
    given = {
        (name, container["name"])
        for name, spec in pod_specs(rendered(values))
        for container in spec["containers"]
        if "envFrom" in container
    }
    assert given == {
        ("datacache-node", "driver"),
        ("datacache-node", "mounts"),
        ("datacache-node", "daemon"),
        ("datacache-controller", "driver"),
    }


@pytest.mark.parametrize("values", ["the defaults", "no credentials"])
def test_a_nodes_driver_reaches_the_stores_as_those_who_read_from_them(values: str) -> None:
    driver, mounts, daemon = (node_container(values, name) for name in ("driver", "mounts", "daemon"))
    assert driver.get("envFrom") == mounts.get("envFrom") == daemon.get("envFrom")
    environment = [each for each in driver["env"] if each["name"] != "NODE_NAME"]
    assert environment == mounts["env"] == daemon["env"]


@promise("Examples and printed pods pass the Pod Security Standard `restricted`")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_pods_of_examples_are_restricted_and_those_outside_our_namespace_have_no_secret(path: Path) -> None:
    objects = examples(path)
    assert not [each for each in objects if each["kind"] == "Secret"]
    ours = [each for each in objects if each["metadata"].get("namespace") == "datacache"]
    assert "secret" not in json.dumps([each for each in objects if each not in ours]).lower()
    for _, spec in pod_specs(objects):
        check_restricted(spec)
        volumes = {each["name"] for each in spec["volumes"] if "csi" in each or "persistentVolumeClaim" in each}
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            for mount in container["volumeMounts"]:
                if mount["name"] in volumes:  # else a lost mount is lost to the pod for good
                    assert mount["mountPropagation"] == "HostToContainer"


def check_restricted(spec: dict[str, Any]) -> None:
    """Check what the Pod Security Standard `restricted` asks of a pod."""
    whole = spec["securityContext"]
    assert whole["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    assert whole["runAsNonRoot"] is True
    assert whole.get("runAsUser") != 0
    assert not [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} <= allowed
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not [port for port in container.get("ports", []) if "hostPort" in port]


@promise("Examples and printed pods pass the Pod Security Standard `restricted`")
def test_pods_that_dsctl_prints_are_restricted(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_text("a")
    create_snapshot("mask", str(tmp_path / "bucket"), tags=["v1"], settings=settings)
    for what in ("mask@v1", "s3://runs/exp-7"):
        command = [sys.executable, "-m", "dataset_cli", "k8s", "pvc", what, "--with-pod"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        [(_, spec)] = pod_specs(list(yaml.safe_load_all(printed)))
        check_restricted(spec)
        assert spec["containers"][0]["volumeMounts"][0]["mountPropagation"] == "HostToContainer"


@promise("No example changes what a documented command or another example has made")
def test_what_is_applied_once_is_not_changed_by_another_example_or_by_a_documented_command() -> None:
    names = [
        (each["kind"], each["metadata"].get("namespace", "default"), each["metadata"]["name"])
        for path in EXAMPLES
        for each in examples(path)
    ]
    assert len(names) == len(set(names))
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/KUBERNETES.md"))
    documented = {name_of(what.partition("://")[2] or what) for what in re.findall(r"dsctl k8s pvc (\S+)", text)}
    assert {"mask-v1", "runs-exp-7"} <= documented
    shown = [each["metadata"]["name"] for each in blocks(text) if each.get("kind") == "PersistentVolumeClaim"]
    claims = [name for kind, _, name in names if kind == "PersistentVolumeClaim"]
    assert not documented & {*claims, *shown}, "a claim cannot be made smaller"


def blocks(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a document's YAML blocks."""
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        yield from (each for each in yaml.safe_load_all(block) if isinstance(each, dict))


@promise("Every container has requests and a limit of memory")
def test_every_container_has_requests_and_a_limit_of_memory() -> None:
    for values in ("the defaults", "sidecars"):
        for name, spec in pod_specs(rendered(values)):
            for container in spec["containers"]:
                resources = container["resources"]
                assert {"cpu", "memory"} <= set(resources["requests"]), (name, container["name"])
                assert "memory" in resources["limits"], (name, container["name"])


def test_the_daemons_limit_holds_its_tier_in_memory_and_what_readers_make_it_use() -> None:
    limit = node_container("the defaults", "daemon")["resources"]["limits"]["memory"]
    idle_and_readers, tier = 300 * 2**20 + 400 * 2**20, 256 * 2**20  # at most, see settings.py
    assert limit == "2Gi"
    assert 2 * idle_and_readers + tier <= 2 * 2**30


@promise("Liveness probes notice a driver, mount host or daemon that hangs, and wait for one that opens its cache")
def test_a_container_that_hangs_is_noticed() -> None:
    commands = {name: node_container("the defaults", name)["livenessProbe"] for name in ("driver", "mounts", "daemon")}
    assert commands["driver"]["httpGet"]["path"] == "/healthz"  # which is Identity.Probe, see `server.probe`
    assert commands["mounts"]["exec"]["command"][-2:] == ["csi_driver.host_check", "/var/lib/datacache/run/mounts.sock"]
    assert commands["daemon"]["exec"]["command"] == ["python", "-m", "datacache.daemon", "--check"]
    for probe in commands.values():
        assert probe["timeoutSeconds"] * probe.get("failureThreshold", 3) >= 30, "a busy node is no hanging one"
    [stateful_set] = kind("the defaults", "StatefulSet")
    assert "livenessProbe" in stateful_set["spec"]["template"]["spec"]["containers"][0]


def test_each_container_of_a_node_has_a_first_process_that_outlives_its_program() -> None:
    for name in ("driver", "mounts", "daemon"):
        assert node_container("the defaults", name)["command"][:3] == ["python", "-m", "csi_driver.first_process"]


@promise("The network reaches metrics from monitoring and MongoDB from datacache, and nothing else")
def test_nobody_reaches_a_pod_over_the_network_but_monitoring_and_datacache_itself() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in kind("the defaults", "NetworkPolicy")}
    mine = {"app.kubernetes.io/instance": "datacache"}
    assert policies["datacache-deny"] == {"podSelector": {"matchLabels": mine}, "policyTypes": ["Ingress"]}
    [metrics] = policies["datacache-metrics"]["ingress"]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert metrics["ports"] == [{"protocol": "TCP", "port": 9808}]
    [mongodb] = policies["datacache-mongodb"]["ingress"]
    assert mongodb["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "datacache"}}}]
    assert policies["datacache-mongodb"]["policyTypes"] == ["Ingress", "Egress"]
    for each in rendered("the defaults"):
        if "template" in each.get("spec", {}):
            assert mine.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    assert not kind("no policies", "NetworkPolicy")
    nightly = next(each for path in EXAMPLES for each in examples(path) if each["kind"] == "CronJob")
    labels = nightly["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "datacache"}


@promise("The port of a cluster is reached by its nodes and by nobody else")
def test_nodes_of_a_cluster_reach_each_other_and_nobody_else_reaches_their_port() -> None:
    mine = {"app.kubernetes.io/instance": "datacache", "app.kubernetes.io/component": "node"}
    policies = {each["metadata"]["name"]: each["spec"] for each in kind("a cluster", "NetworkPolicy")}
    assert policies["datacache-cluster"] == {
        "podSelector": {"matchLabels": mine},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": mine}}], "ports": [{"protocol": "TCP", "port": 7171}]},
        ],
    }
    [daemon_set] = kind("a cluster", "DaemonSet")
    assert mine.items() <= daemon_set["spec"]["template"]["metadata"]["labels"].items()
    assert "datacache-cluster" not in json.dumps(rendered("the defaults"))


def test_daemon_and_mounts_of_a_node_have_the_clusters_key_and_settings_that_they_understand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [daemon_set] = kind("a cluster", "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    [tls] = [each["secret"] for each in spec["volumes"] if each["name"] == "cluster-tls"]
    assert tls == {"secretName": "lab-tls", "defaultMode": 0o400}
    have = [c["name"] for c in spec["containers"] if "cluster-key" in {mount["name"] for mount in c["volumeMounts"]}]
    assert have == ["mounts", "daemon"]
    [volume] = [each["secret"] for each in spec["volumes"] if each["name"] == "cluster-key"]
    assert volume == {"secretName": "datacache-cluster", "defaultMode": 0o400, "items": [{"key": "key", "path": "key"}]}
    daemon, mounts, driver = (node_container("a cluster", name) for name in ("daemon", "mounts", "driver"))
    assert (mounts["env"], mounts["volumeMounts"]) == (daemon["env"], daemon["volumeMounts"])
    [mounted] = [each["mountPath"] for each in daemon["volumeMounts"] if each["name"] == "cluster-key"]
    without = driver["env"][1:]  # its NODE_NAME
    added = daemon["env"][len(without) :]
    assert daemon["env"][: len(without)] == without
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in added if "valueFrom" in each}
    assert fields == {"POD_IP": "status.podIP"}
    [name] = [each for each in daemon["env"] if each["name"] == "DATACACHE_NODE"]
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert [each["name"] for each in added].index("POD_IP") < [each["name"] for each in added].index("DATACACHE_LISTEN")
    for each in (*added, name):
        monkeypatch.setenv(each["name"], each.get("value", "gpu-1").replace("$(POD_IP)", "10.0.0.7"))
    monkeypatch.setenv("DATACACHE_HOME", str(tmp_path))
    found = load_settings()
    assert (found.cluster, found.node, found.zone, found.listen) == ("datacache", "gpu-1", "hall-2", "10.0.0.7:7171")
    [zone] = [
        each for each in node_container("a cluster in zones", "daemon")["env"] if each["name"] == "DATACACHE_ZONE"
    ]
    assert zone["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    assert found.cluster_key_file == Path(mounted) / "key"
    [folder] = [each["mountPath"] for each in daemon["volumeMounts"] if each["name"] == "cluster-tls"]
    assert found.cluster_tls == Path(folder)
    monkeypatch.setenv("DATACACHE_LISTEN", "[fd00::7]:7171")
    assert load_settings().listen == "[fd00::7]:7171"
    assert [found.mode_of(name) for name in ("team-a-faces", "mask")] == ["partition", "share"]


@promise("MongoDB has a password or does not start")
def test_mongodb_starts_with_a_password_or_not_at_all() -> None:
    [stateful_set] = kind("the defaults", "StatefulSet")
    [mongodb] = stateful_set["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each for each in mongodb["env"]}
    wanted = {"secretKeyRef": {"name": "datacache-mongodb", "key": "password"}}  # not optional
    assert environment["MONGO_INITDB_ROOT_PASSWORD"]["valueFrom"] == wanted
    assert "--auth" in mongodb["args"]
    for container in ("driver", "mounts", "daemon"):
        env = node_container("the defaults", container)["env"]
        names = [each["name"] for each in env]
        assert names.index("MONGODB_PASSWORD") < names.index("DATACACHE_CATALOG"), "only what came before is put in"
        url = next(each["value"] for each in env if each["name"] == "DATACACHE_CATALOG")
        assert url == "mongodb://datacache:$(MONGODB_PASSWORD)@datacache-mongodb.lab.svc/datacache?authSource=admin"
    assert not [each for each in rendered("the defaults") if each["kind"] == "Secret"]
    text = (ROOT / "docs" / "KUBERNETES.md").read_text(encoding="utf-8")
    assert 'create secret generic datacache-mongodb --from-literal=password="$(openssl rand -hex 16)"' in text


def test_the_controller_may_be_drained_one_pod_at_a_time_and_nodes_are_critical() -> None:
    [budget] = kind("the defaults", "PodDisruptionBudget")
    [deployment] = kind("the defaults", "Deployment")
    assert budget["spec"] == {"maxUnavailable": 1, "selector": deployment["spec"]["selector"]}
    # A kubelet that shuts a node down ends pods of these classes last: mounts outlive those who read them.
    [daemon_set] = kind("the defaults", "DaemonSet")
    assert daemon_set["spec"]["template"]["spec"]["priorityClassName"] == "system-node-critical"
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == "system-cluster-critical"


def test_each_node_pool_is_a_daemon_set_with_its_own_values_over_those_of_all_nodes() -> None:
    pools = {each["metadata"]["name"]: each["spec"] for each in kind("node pools", "DaemonSet")}
    assert set(pools) == {"datacache-node-cpu", "datacache-node-gpu"}

    def of(pool: str, container: str) -> dict[str, Any]:
        containers = pools[pool]["template"]["spec"]["containers"]
        return next(each for each in containers if each["name"] == container)

    def environment(pool: str) -> dict[str, Any]:
        env = of(pool, "daemon")["env"]
        assert len({each["name"] for each in env}) == len(env), "a name that comes twice is refused by some"
        return {each["name"]: each.get("value") for each in env}

    cpu, gpu = environment("datacache-node-cpu"), environment("datacache-node-gpu")
    assert (cpu["DATACACHE_SSD_BYTES"], gpu["DATACACHE_SSD_BYTES"]) == ("200GB", "2TB")
    assert cpu["DATACACHE_ACCESS"] == gpu["DATACACHE_ACCESS"] == "none"
    assert (cpu["DATACACHE_HOME"], gpu["DATACACHE_HOME"]) == ("/var/lib/datacache", "/mnt/nvme/datacache")
    assert gpu["DATACACHE_MOUNT_HOST"] == "/mnt/nvme/datacache/run/mounts.sock"
    plain = chart.default_values()["node"]
    limits = [of(name, "daemon")["resources"]["limits"]["memory"] for name in sorted(pools)]
    assert limits == [plain["resources"]["daemon"]["limits"]["memory"], "10Gi"]
    assert of("datacache-node-gpu", "mounts")["resources"] == plain["resources"]["mounts"]
    assert of("datacache-node-gpu", "daemon")["resources"]["requests"] == plain["resources"]["daemon"]["requests"]
    specs = {name: spec["template"]["spec"] for name, spec in pools.items()}
    assert specs["datacache-node-gpu"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "gpu"}
    assert specs["datacache-node-cpu"]["tolerations"] == plain["tolerations"]
    assert pools["datacache-node-gpu"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 2, "maxUnavailable": 0}
    assert pools["datacache-node-cpu"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": "10%", "maxUnavailable": 0}
    for spec in pools.values():
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        others = [each["selector"]["matchLabels"] for each in pools.values() if each is not spec]
        assert not any(other.items() <= labels.items() for other in others), "one's pods are not another's"
        # Policies, the ServiceMonitor and what documents say of `component=node` hold for all.
        assert labels["app.kubernetes.io/component"] == "node"
    assert pools["datacache-node-gpu"]["template"]["metadata"]["labels"]["team"] == "gpu"


def test_every_pod_of_ours_has_what_an_operator_sets() -> None:
    found = 0
    for each in rendered("what an operator sets"):
        name = each["metadata"]["name"]
        if each["kind"] not in ("DaemonSet", "Deployment"):
            continue
        found += 1
        metadata, spec = each["spec"]["template"]["metadata"], each["spec"]["template"]["spec"]
        assert metadata["labels"]["team"] == "storage", name
        assert metadata["annotations"]["a.example/b"] == "c d"
        assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": ["10.0.0.53"]})
        ours = [container for container in spec["containers"] if container["image"].startswith("datacache:")]
        for container in ours:
            env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
            assert env["HTTPS_PROXY"] == "http://proxy.example:3128"
            assert env["AWS_CA_BUNDLE"] == {"configMapKeyRef": {"name": "ca", "key": "path"}}
            assert env["DATACACHE_LOG_LEVEL"] == "debug"
        assert ours
    assert found == 3
    [daemon_set] = kind("what an operator sets", "DaemonSet")
    assert daemon_set["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert daemon_set["spec"]["template"]["spec"]["securityContext"] == {"seLinuxOptions": {"type": "spc_t"}}
    deployments = {each["metadata"]["name"]: each["spec"] for each in kind("what an operator sets", "Deployment")}
    assert deployments["datacache-controller"]["strategy"] == {"type": "Recreate"}
    assert deployments["datacache-controller"]["template"]["spec"]["affinity"] == {"nodeAffinity": {}}


def test_controllers_keep_away_from_each_other_where_they_can() -> None:
    [deployment] = kind("the defaults", "Deployment")
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    [preferred] = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"] == deployment["spec"]["selector"]


def test_a_secrets_new_version_is_a_change_of_the_pods_that_use_it() -> None:
    """Helm looks Secrets up in the cluster; without one the annotation has none of their versions."""
    for values, versions in (("the defaults", "//"), ("a cluster", "///")):
        for each in (*kind(values, "DaemonSet"), *kind(values, "Deployment")):
            assert each["spec"]["template"]["metadata"]["annotations"] == {"datacache.io/secrets": versions}
    text = (chart.CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    looked_up = re.findall(r"lookup .*?resourceVersion", text)
    assert len(looked_up) == 5, "of stores, catalog, MongoDB, the cluster's key and its certificates"
    assert ".data" not in text


def test_openshift_lets_nodes_do_what_they_do_and_the_others_run_as_their_users() -> None:
    [constraints] = kind("OpenShift", "SecurityContextConstraints")
    specs = dict(pod_specs(rendered("OpenShift")))
    node = specs["datacache-node"]
    used = {name for volume in node["volumes"] for name in volume if name != "name"}
    assert used <= set(constraints["volumes"])
    assert constraints["allowHostPID"] is node["hostPID"] is True
    assert constraints["allowHostNetwork"] is bool(node.get("hostNetwork"))
    roles = {each["metadata"]["name"]: each["rules"] for each in kind("OpenShift", "Role")}
    granted = {
        subject["name"]: roles[binding["roleRef"]["name"]][0]["resourceNames"]
        for binding in kind("OpenShift", "RoleBinding")
        if "-scc-" in binding["metadata"]["name"]
        for subject in binding["subjects"]
    }
    assert granted.pop("datacache-node") == ["datacache-node"]
    accounts = {spec.get("serviceAccountName", "default") for name, spec in specs.items() if name != "datacache-node"}
    accounts.add("datacache-datasets")  # of the Jobs that the controller makes
    assert granted == {name: ["nonroot-v2"] for name in accounts}
    assert not kind("the defaults", "SecurityContextConstraints")


def test_no_pod_asks_for_a_processor_of_one_kind() -> None:
    for name, spec in pod_specs(rendered("the defaults")):
        assert "kubernetes.io/arch" not in json.dumps(spec), name


def images_of(values: str) -> set[str]:
    return {container["image"] for _, spec in pod_specs(rendered(values)) for container in spec["containers"]}


def test_one_registry_holds_for_all_images_and_the_documents_list_them() -> None:
    mirror = "registry.lab:5000/mirror/"
    mirrored = images_of("everything, from one registry")
    assert all(image.startswith(mirror) for image in mirrored)
    document = (ROOT / "docs" / "KUBERNETES.md").read_text(encoding="utf-8")
    section = document.partition("\n### Air-gapped\n")[2].partition("\n### ")[0]
    listed = re.findall(r"^\| `([^`]+:[^`]+)` \|", section, re.MULTILINE)
    everything = images_of("sidecars") | images_of("a page")
    assert set(listed) == everything
    assert {image.removeprefix("registry.k8s.io/") for image in everything} == {
        image.removeprefix(mirror) for image in mirrored
    }


@promise("Images can be named by digest, and ours is built from locked versions and checksums")
def test_images_can_be_named_by_digest() -> None:
    digest = f"sha256:{'0' * 64}"
    assert node_container("digests", "daemon")["image"] == f"datacache@{digest}"
    images = {c["image"] for _, spec in pod_specs(rendered("digests")) for c in spec["containers"]}
    assert f"registry.k8s.io/sig-storage/csi-resizer@sha256:{'1' * 64}" in images
    assert {f"mongo@{digest}", f"registry.k8s.io/sig-storage/csi-provisioner:v6.3.0@{digest}"} <= images


def test_images_have_a_version_and_come_from_where_they_are_made() -> None:
    everything = [*rendered("sidecars"), *(each for path in EXAMPLES for each in examples(path))]
    images = {container["image"] for _, spec in pod_specs(everything) for container in spec["containers"]}
    official = r"(registry\.k8s\.io/sig-storage/)?[a-z-]+:v?\d+(\.\d+)+"
    assert [image for image in images if not re.fullmatch(official, image)] == []
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${PYTHON_IMAGE}", "runtime"}
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-bookworm$", dockerfile, re.MULTILINE)


def test_the_chart_the_image_and_the_package_have_one_version() -> None:
    import datacache

    described = yaml.safe_load((chart.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    tag = chart.default_values()["image"]["tag"]
    assert described["version"] == described["appVersion"] == tag == datacache.__version__
    used = re.findall(r"image: datacache(?:-training)?:(\S+)", "".join(p.read_text("utf-8") for p in EXAMPLES))
    assert set(used) == {tag}


def test_a_new_node_pod_runs_beside_the_old_one_unless_a_sidecar_registers() -> None:
    def update(values: str) -> Any:
        return kind(values, "DaemonSet")[0]["spec"]["updateStrategy"]["rollingUpdate"]

    assert update("the defaults") == {"maxSurge": 1, "maxUnavailable": 0}
    assert update("sidecars") == {"maxSurge": 0, "maxUnavailable": 1}
    assert any(arg.startswith("--register=") for arg in node_container("the defaults", "driver")["args"])
    assert not any(arg.startswith("--register=") for arg in node_container("sidecars", "driver")["args"])
    [daemon_set] = kind("the defaults", "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    # Ports of the node itself are the first pod's only.
    assert "hostNetwork" not in spec
    assert not [p for c in spec["containers"] for p in c.get("ports", []) if "hostPort" in p]


def test_a_node_pod_is_ready_once_its_mount_host_has_taken_everything_over() -> None:
    mounts = node_container("the defaults", "mounts")
    [ready_file] = [word.partition("=")[2] for word in mounts["command"] if word.startswith("--ready-file=")]
    assert mounts["readinessProbe"]["exec"]["command"] == ["sh", "-c", f'kill -0 "$(cat {ready_file})"']
    [daemon_set] = kind("the defaults", "DaemonSet")
    folders = {volume["name"] for volume in daemon_set["spec"]["template"]["spec"]["volumes"] if "emptyDir" in volume}
    own = [each["mountPath"] for each in mounts["volumeMounts"] if each["name"] in folders]
    assert str(Path(ready_file).parent) in own, "of this pod alone"


@pytest.mark.parametrize("values", ["the defaults", "all of it"])
def test_what_is_mounted_on_the_node_has_the_same_path_inside_and_reaches_the_node(values: str) -> None:
    [daemon_set] = kind(values, "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    assert spec["hostPID"] is True
    paths = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    for container in spec["containers"]:
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        assert mounts["home"]["mountPropagation"] == "Bidirectional"
        for name in {"home", "kubelet", "shm"} & set(mounts):
            assert mounts[name]["mountPath"] == paths[name]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment["DATACACHE_HOME"] == paths["home"]
        assert environment["DATACACHE_MOUNT_HOST"] == f"{paths['home']}/run/mounts.sock"
        assert environment["DATACACHE_DAEMON"] == "external"


@promise("The network reaches the page in a pod from its proxy alone")
def test_the_page_is_one_restricted_pod_that_the_proxy_alone_reaches_and_the_command_understands() -> None:
    from dataset_cli.commands.ui import ui

    for values, header in (("a page", ""), ("a page behind a proxy", "X-Auth-Request-User")):
        objects = {each["kind"]: each for each in rendered(values) if each["metadata"]["name"] == "datacache-ui"}
        assert ("Ingress" in objects) is bool(header)
        deployment = objects["Deployment"]["spec"]
        assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
        spec = deployment["template"]["spec"]
        check_restricted(spec)
        assert spec["automountServiceAccountToken"] is False
        [container] = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {
            name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")
        } == dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), HEALTH)
        assert container["command"] == ["dsctl", "ui"]
        options = ui.make_context("ui", list(container["args"])).params
        assert (options["host"], options["port"], options["no_browser"]) == ("0.0.0.0", 8765, True)
        assert options["read_only"] is (values == "a page")
        environment = {each["name"]: each.get("value", "a secret") for each in container["env"]}
        environment |= {"DATACACHE_CATALOG": "mongodb://db.example/datacache"}
        settings = load_settings(environment)
        assert settings.ui_hosts == (("data.example.org", "data.lab") if header else ("data.example.org",))
        assert (settings.ui_user_header, settings.ui_namespace) == (header, "team-a" if header else "")
        assert settings.sources == ("*",)
        labels = deployment["template"]["metadata"]["labels"]
        for selector in (objects["Service"]["spec"]["selector"], deployment["selector"]["matchLabels"]):
            assert selector.items() <= labels.items()
        policy = objects["NetworkPolicy"]["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        [rule] = policy["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": container["ports"][0]["containerPort"]}]
        [peer] = rule["from"]
        assert peer["namespaceSelector"]["matchLabels"]
    assert [each["host"] for each in objects["Ingress"]["spec"]["rules"]] == ["data.example.org", "data.lab"]
    assert objects["Ingress"]["spec"]["tls"] == [{"secretName": "data-tls", "hosts": ["data.example.org", "data.lab"]}]
    unguarded = {"networkPolicies": {"enabled": False}, "ui": VALUES["a page behind a proxy"]["ui"]}
    with pytest.raises(SystemExit, match="any user"):
        chart.render(chart.merge(chart.default_values(), unguarded))


def test_the_programs_understand_the_arguments_they_get() -> None:
    from csi_driver.__main__ import _parser

    [deployment] = kind("all of it", "Deployment")
    driver = deployment["spec"]["template"]["spec"]["containers"][0]
    assert _parser().parse_args(driver["args"]).metrics_address == "*"
    parsed = _parser().parse_args(driver["args"])
    assert (parsed.mode, parsed.metrics_port) == ("controller", 9808)
    assert parsed.allow_bucket == ["s3://runs/${pvc.namespace}/"]
    parsed = _parser().parse_args(node_container("all of it", "driver")["args"])
    assert str(parsed.endpoint) == "/var/lib/k0s/kubelet/plugins/datacache.io/csi.sock"
    assert str(parsed.register) == "/var/lib/k0s/kubelet/plugins_registry"


def test_the_driver_is_named_as_it_calls_itself() -> None:
    from csi_driver import DRIVER_NAME

    assert kind("the defaults", "CSIDriver")[0]["metadata"]["name"] == DRIVER_NAME
    assert {each["provisioner"] for each in kind("the defaults", "StorageClass")} == {DRIVER_NAME}
    assert "DATACACHE_HOME" in json.dumps(rendered("the defaults"))


def test_the_notes_name_what_was_installed() -> None:
    values = chart.merge(chart.default_values(), VALUES["all of it"])
    notes = chart.render_texts(values, namespace="lab")["NOTES.txt"]
    assert "kubectl -n lab create secret generic datacache-stores" in notes
    assert "create secret generic datacache-mongodb" in notes
    assert "HostToContainer" in notes
    assert "{{" not in notes


def test_what_documents_and_examples_name_is_there() -> None:
    values = chart.default_values()
    for name in ("README.md", "docs/KUBERNETES.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for path in re.findall(r"(?<![\w/])(deploy/(?!datacache-controller)[\w./-]*[\w/])", text):
            assert (ROOT / path).exists(), f"{name}: {path}"
        for path in re.findall(
            r"`((?:catalog|mongodb|metrics|registrar|buckets|settings|global|image|node|openshift|ui)\.[\w.]+)[`=]",
            text,
        ):
            found: Any = values
            for part in path.split(".")[: 1 if path.startswith("settings.") else None]:
                assert part in found, f"{name}: {path}"
                found = found[part]
    scripts = [d["data"]["train.py"] for p in EXAMPLES for d in examples(p) if d["kind"] == "ConfigMap"]
    for script in scripts:
        compile(script, "train.py", "exec")
    assert len(scripts) == 1


def test_annotations_and_attributes_of_examples_are_what_the_driver_reads() -> None:
    from csi_driver.volumes import parse_context, read_request

    claims = attributes = 0
    everything = [each for path in EXAMPLES for each in examples(path)]
    classes = {
        each["metadata"]["name"]: each.get("parameters") or {}
        for each in [*rendered("the defaults"), *everything]
        if each["kind"] == "StorageClass"
    }
    for each in everything:
        annotations = each["metadata"].get("annotations", {})
        if each["kind"] == "PersistentVolumeClaim" and each["spec"]["storageClassName"]:
            parameters = classes[each["spec"]["storageClassName"]]
            read_request(parameters, annotations, namespace="lab", name=each["metadata"]["name"])
            claims += 1
        elif each["kind"] == "PersistentVolume":
            parse_context(each["spec"]["csi"]["volumeAttributes"])
            attributes += 1
        for _, spec in pod_specs([each]):
            for volume in spec["volumes"]:
                if "csi" in volume:
                    parse_context(volume["csi"]["volumeAttributes"])
                    attributes += 1
    assert claims >= 5
    assert attributes == 2
