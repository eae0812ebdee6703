"""The stand-in for the API server with DataSets, Jobs, CronJobs and pods, as the reconciler of DataSets uses them; and
a stand-in for the Job controller that runs a Job's command as it is written.

As the real one it validates (the CRD's schema without its CEL rules; Kubernetes' schemas), counts generations and
resource versions, refuses a patch of an older version, and answers watches, which it ends with 410 on demand.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate

from scripts import render_manifests as chart
from tests.csi_driver.api_server import ApiHandler, ApiServer

SPACE, TEMPLATE = "datacache", "datacache-datasets"
VERSION = "1.37"
_DATASETS = "datasets"
_CRON = re.compile(r"(@(hourly|daily|weekly|monthly|yearly))|([0-9*/,-]+ ){4}[0-9A-Za-z*/,-]+")


@cache
def dataset_objects() -> list[dict[str, Any]]:
    """What the chart has for DataSets."""
    values = chart.merge(chart.default_values(), {"datasets": {"enabled": True}})
    return chart.render(values, namespace=SPACE)["datasets.yaml"]


def dataset_schema() -> dict[str, Any]:
    """The schema of the resource."""
    [crd] = [each for each in dataset_objects() if each["kind"] == "CustomResourceDefinition"]
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


class ClusterApi(ApiServer):
    """`objects` are by plural, namespace and name; `history` are the events of DataSets."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.expired = False
        self.changed = threading.Condition(threading.RLock())
        self._version = 0
        super().__init__(_ClusterHandler)
        [template] = [each for each in dataset_objects() if each["kind"] == "PodTemplate"]
        self.put("podtemplates", template)

    def put(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        """Keep an object, new or changed, as an apply of it does."""
        with self.changed:
            key = (plural, body["metadata"]["namespace"], body["metadata"]["name"])
            old = self.objects.get(key)
            self._version += 1
            new = copy.deepcopy(body)
            metadata = new["metadata"]
            metadata["resourceVersion"] = str(self._version)
            metadata["uid"] = old["metadata"]["uid"] if old else str(uuid.uuid4())
            hour, rest = divmod(self._version, 3600)
            since = f"2026-01-01T{hour:02}:{rest // 60:02}:{rest % 60:02}Z"
            metadata["creationTimestamp"] = old["metadata"]["creationTimestamp"] if old else since
            generation = old["metadata"]["generation"] if old else 0
            metadata["generation"] = generation + (old is None or old.get("spec") != new.get("spec"))
            if old and "status" not in new and "status" in old:
                new["status"] = old["status"]
            self.objects[key] = new
            self._note_change(plural, "MODIFIED" if old else "ADDED", new)
            return new

    def remove(self, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Delete an object; a CronJob with its Jobs."""
        with self.changed:
            gone = self.objects.pop((plural, namespace, name), None)
            if gone is not None:
                self._version += 1
                self._note_change(plural, "DELETED", gone)
            return gone

    def _note_change(self, plural: str, kind: str, body: dict[str, Any]) -> None:
        if plural == _DATASETS:
            self.history.append((self._version, kind, copy.deepcopy(body)))
        self.changed.notify_all()

    def apply(self, name: str, spec: dict[str, Any], *, namespace: str = "team-a") -> dict[str, Any]:
        """Do as `kubectl apply` with a DataSet. `jsonschema.ValidationError` as the API server would refuse it."""
        body = {
            "apiVersion": "datacache.io/v1alpha1",
            "kind": "DataSet",
            "metadata": {"namespace": namespace, "name": name},
            "spec": spec,
        }
        jsonschema.Draft202012Validator(dataset_schema()).validate(body)
        return self.put(_DATASETS, body)

    def status(self, name: str, *, namespace: str = "team-a") -> dict[str, Any]:
        """The status of a DataSet; {} for none."""
        found: dict[str, Any] = self.objects[_DATASETS, namespace, name].get("status", {})
        return found

    def note(self, request: str) -> None:
        super().note(request)
        with self.changed:
            self.changed.notify_all()

    def expire(self, expired: bool = True) -> None:
        """End watches with 410 Gone, and answer new ones so."""
        with self.changed:
            self.expired = expired
            self.changed.notify_all()

    def ready(self, name: str, *, namespace: str = "team-a") -> tuple[str, str, str]:
        """Its condition: status, reason, message."""
        [condition] = self.status(name, namespace=namespace)["conditions"]
        return condition["status"], condition["reason"], condition["message"]

    def all(self, plural: str) -> list[dict[str, Any]]:
        """All objects of a kind, oldest first."""
        found = [each for key, each in list(self.objects.items()) if key[0] == plural]
        return sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))

    def wait_until(self, holds: Any) -> None:
        """Until something holds after a change."""
        with self.changed:
            assert self.changed.wait_for(holds, 60), self.requests[-20:]

    def run(self, job: dict[str, Any], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a Job as it is written, in the environment of the test, and note how it ended, as Kubernetes does."""
        [container] = job["spec"]["template"]["spec"]["containers"]
        command = [*container["command"], *container["args"]]
        variables = {each["name"]: each.get("value", "a secret of the cluster") for each in container["env"]}
        # `dsctl` on the PATH is this tree's.
        words = [expand(word, variables) for word in command]
        assert words[0] == "dsctl"
        done = subprocess.run(
            [sys.executable, "-m", "dataset_cli", *words[1:]],
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.end(job, failed=bool(done.returncode), said=done.stderr)
        return done

    def end(self, job: dict[str, Any], *, failed: bool, said: str = "", reason: str = "BackoffLimitExceeded") -> None:
        """Note that a Job has ended."""
        name = job["metadata"]["name"]
        terminated = {"exitCode": int(failed), "message": said[-2048:] if failed else ""}
        pod = {
            "metadata": {
                "namespace": SPACE,
                "name": f"{name}-x7k2p",
                "labels": {"batch.kubernetes.io/job-name": name},
            },
            "status": {"containerStatuses": [{"name": "dsctl", "state": {"terminated": terminated}}]},
        }
        self.put("pods", pod)
        condition = {"type": "Failed" if failed else "Complete", "status": "True"} | (
            {"reason": reason} if failed else {}
        )
        self.put("jobs", job | {"status": {"conditions": [condition]}})

    def start_scheduled(self, cron_job: dict[str, Any], number: int) -> dict[str, Any]:
        """Make the Job that a CronJob makes when its time has come."""
        template = cron_job["spec"]["jobTemplate"]
        name = f"{cron_job['metadata']['name']}-{number}"
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": template["metadata"] | {"namespace": SPACE, "name": name},
            "spec": template["spec"],
        }
        self.put("cronjobs", cron_job | {"status": {"lastScheduleTime": f"2026-01-02T03:17:{number:02}Z"}})
        return self.put("jobs", body)


def expand(text: str, variables: dict[str, str]) -> str:
    """Put variables into a word of a command, as a kubelet does (k8s.io/kubernetes/third_party/forked/golang/expansion:
    `$$` is `$`, `$(NAME)` the variable if there is one)."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


class _ClusterHandler(ApiHandler):
    """Answers requests about the kinds of `ClusterApi`."""

    def do_DELETE(self) -> None:  # noqa: N802
        self._answer("DELETE")

    def _found(self, method: str, path: list[str], body: Any) -> tuple[int, Any]:
        api = self.api
        query = dict(part.split("=", 1) for part in self.path.partition("?")[2].split("&") if "=" in part)
        with api.changed:
            match method, path:
                case "GET", ["apis", "datacache.io", "v1alpha1", "datasets"]:
                    if query.get("watch") == "true":
                        return self._watch(int(query["resourceVersion"]), float(query["timeoutSeconds"]))
                    return self._list("datasets", None, query)
                case "PATCH", ["apis", "datacache.io", "v1alpha1", "namespaces", namespace, "datasets", name, "status"]:
                    return self._patch_status(namespace, name, body)
                case _, ["apis", "batch", "v1", "namespaces", namespace, ("jobs" | "cronjobs") as plural, *rest]:
                    return self._batch(method, plural, namespace, rest, body, query)
                case "GET", ["api", "v1", "namespaces", namespace, ("pods" | "podtemplates") as plural, *rest]:
                    if not rest:
                        return self._list(plural, namespace, query)
                    found = api.objects.get((plural, namespace, rest[0]))
                    return (200, found) if found else (404, _failure(404))
        return super()._found(method, path, body)

    def _list(self, plural: str, namespace: str | None, query: dict[str, str]) -> tuple[int, Any]:
        label, _, value = query.get("labelSelector", "").replace("%2F", "/").replace("%3D", "=").partition("=")
        items = []
        for each in self.api.all(plural):
            labels = each["metadata"].get("labels", {})
            wanted = not label or (label in labels and value in ("", labels[label]))
            if wanted and namespace in (None, each["metadata"]["namespace"]):
                items.append(each)
        return 200, {"metadata": {"resourceVersion": str(self.api._version)}, "items": items}

    def _patch_status(self, namespace: str, name: str, body: Any) -> tuple[int, Any]:
        api = self.api
        there = api.objects.get(("datasets", namespace, name))
        if there is None:
            return 404, _failure(404)
        if self.headers["Content-Type"] != "application/merge-patch+json":
            return 415, _failure(415)
        metadata = body.pop("metadata", {})
        if any(there["metadata"][field] != value for field, value in metadata.items()):
            return 409, _failure(409)
        assert set(body) == {"status"}
        status = there.get("status", {}) | body["status"]
        status = {field: value for field, value in status.items() if value is not None}
        changed = there | {"status": status}
        schema = dataset_schema()["properties"]["status"]
        assert not set(status) - set(schema["properties"]), "the API server would prune it"
        jsonschema.Draft202012Validator(schema).validate(status)
        return 200, api.put("datasets", changed)

    def _batch(
        self, method: str, plural: str, namespace: str, rest: list[str], body: Any, query: dict[str, str]
    ) -> tuple[int, Any]:
        api = self.api
        match method, rest:
            case "GET", []:
                return self._list(plural, namespace, query)
            case "POST", []:
                kubernetes_validate.validate(body, VERSION, strict=True)
                if (plural, namespace, body["metadata"]["name"]) in api.objects:
                    return 409, _failure(409)
                return 201, api.put(plural, body)
            case "PATCH", [name]:
                assert self.headers["Content-Type"] == "application/apply-patch+yaml"
                assert query["fieldManager"]
                kubernetes_validate.validate(body, VERSION, strict=True)
                assert len(name) <= 52
                if not _CRON.fullmatch(body["spec"]["schedule"]):
                    words = f'CronJob.batch "{name}" is invalid: spec.schedule: Invalid value'
                    return 422, _failure(422) | {"message": words}
                return 200, api.put(plural, body)
            case "DELETE", [name]:
                there = api.objects.get((plural, namespace, name))
                if there is None:
                    return 404, _failure(404)
                if body["preconditions"]["uid"] != there["metadata"]["uid"]:
                    return 409, _failure(409)
                return 200, api.remove(plural, namespace, name)
        return 405, _failure(405)

    def _watch(self, version: int, timeout_s: float) -> tuple[int, Any]:
        """Send events until the time is over, then an answer that is never sent."""
        api = self.api
        if api.expired:
            return 410, _failure(410)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        while True:
            for number, kind, body in [each for each in api.history if each[0] > version]:
                version = number
                self._chunk({"type": kind, "object": body})
            if api.expired:
                self._chunk({"type": "ERROR", "object": _failure(410)})
                break
            if not api.changed.wait(timeout_s):
                break
        self.wfile.write(b"0\r\n\r\n")
        return 0, None

    def _chunk(self, event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _send(self, status: int, answer: Any) -> None:
        if status:  # else a watch has answered
            super()._send(status, answer)


def _failure(code: int) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "metadata": {}}
