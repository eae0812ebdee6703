"""The Jobs that make snapshots for DataSet resources: write them, and read how they ended.

They run beside datacache, in whose namespace the credentials are and no tenant has rights, from a PodTemplate of the
chart. An owner of another namespace is none for Kubernetes' garbage collector, so they carry the resource's uid as a
label. No word of a resource reaches a shell, and `$(NAME)`, for which a kubelet would put in a variable such as a
password, is escaped. Pure functions. Any thread.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from csi_driver.datasets.resource import ResourceIdentity, WantedDataset

UID_LABEL, RUN_LABEL = "datacache.io/dataset-uid", "datacache.io/dataset-run"
RESOURCE = "datacache.io/dataset-resource"
_APPLIED = "datacache.io/applied"
_CONTAINER = "dsctl"
_TRIES = 3
_KEEP_S = 86_400
"""The time that a Job stays after its end, for whoever looks for its log."""
_LATE_S = 3600
"""A scheduled run that could not start for so long waits for the next time."""
_WRONG_USAGE = 2
_MAX_WORDS = 1000


class EndedRun(NamedTuple):
    """A Job that has ended."""

    job: str
    failed: bool
    reason: str


def run_of(identity: ResourceIdentity, wanted: WantedDataset) -> str:
    """Return the run that makes what is wanted: the one that its status names, or where that made something else, the
    one of this generation."""
    run = str(identity.status.get("run") or "")
    return run if run.startswith(f"{wanted.digest}-") else f"{wanted.digest}-{identity.generation}"


def job_of(identity: ResourceIdentity, wanted: WantedDataset, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Job of a run. Its name is the same whoever makes it, so that there is one."""
    metadata = _metadata(identity, wanted, template)
    metadata["name"] = _name(identity, run_of(identity, wanted))
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job_spec(wanted, template)}


def cron_job_of(identity: ResourceIdentity, wanted: WantedDataset, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CronJob of a resource with a schedule."""
    metadata = _metadata(identity, wanted, template)
    of_jobs = {key: metadata[key] for key in ("labels", "annotations")}
    spec = {
        "schedule": wanted.schedule,
        **({"timeZone": wanted.time_zone} if wanted.time_zone else {}),
        "suspend": wanted.suspend,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": _LATE_S,
        "successfulJobsHistoryLimit": 1,
        "failedJobsHistoryLimit": 1,
        "jobTemplate": {"metadata": of_jobs, "spec": _job_spec(wanted, template)},
    }
    applied = hashlib.blake2b(json.dumps(spec, sort_keys=True).encode(), digest_size=8).hexdigest()
    metadata |= {"name": _name(identity), "annotations": metadata["annotations"] | {_APPLIED: applied}}
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata, "spec": spec}


def is_applied(there: Mapping[str, Any] | None, cron_job: Mapping[str, Any]) -> bool:
    """Tell whether the CronJob that is there was written from this one."""
    annotations = (there or {}).get("metadata", {}).get("annotations") or {}
    return bool(annotations.get(_APPLIED) == cron_job["metadata"]["annotations"][_APPLIED])


def is_of(job: Mapping[str, Any], run: str) -> bool:
    """Tell whether a Job belongs to a run, which its schedule repeats."""
    return bool(job["metadata"]["labels"].get(RUN_LABEL) == run)


def is_under_way(job: Mapping[str, Any]) -> bool:
    """Tell whether a Job has not ended."""
    return _ended(job) is None


def newest_ended(jobs: Iterable[Mapping[str, Any]]) -> EndedRun | None:
    """Return the Job that was made last of those that have ended."""
    for job in sorted(jobs, key=lambda job: str(job["metadata"].get("creationTimestamp")), reverse=True):
        if (ended := _ended(job)) is not None:
            return ended
    return None


def words_of(pods: Iterable[Mapping[str, Any]]) -> str:
    """Return what `dsctl` said in the last of a Job's pods before it failed, '' for nothing. Only its own error and
    hint: the rest of a log is not for tenants."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True):
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            said = ((status.get("state") or {}).get("terminated") or {}).get("message") or ""
            found = re.findall(r"^error: (.*)(?:\nhint: (.*))?", said, re.MULTILINE)
            if found:
                error, hint = found[-1]
                return f"{error.removesuffix('.')}. {hint}".removesuffix(" ")[:_MAX_WORDS]
    return ""


def _ended(job: Mapping[str, Any]) -> EndedRun | None:
    for each in (job.get("status") or {}).get("conditions") or ():
        if each.get("status") == "True" and each.get("type") in ("Complete", "Failed"):
            failed = each["type"] == "Failed"
            return EndedRun(job["metadata"]["name"], failed, str(each.get("reason") or "") if failed else "")
    return None


def _name(identity: ResourceIdentity, *parts: str) -> str:
    """Return a name for an object of a resource: at most 52 characters, all that a CronJob may have."""
    digest = hashlib.blake2b("\0".join((identity.uid, *parts)).encode(), digest_size=8).hexdigest()
    return f"{re.sub('[^a-z0-9-]', '-', identity.name[:32]).strip('-')}-{digest}"


def _metadata(identity: ResourceIdentity, wanted: WantedDataset, template: Mapping[str, Any]) -> dict[str, Any]:
    labels = dict(template["metadata"].get("labels") or {}) | {"app.kubernetes.io/managed-by": "datacache"}
    return {
        "namespace": template["metadata"]["namespace"],
        "labels": labels | {UID_LABEL: identity.uid, RUN_LABEL: run_of(identity, wanted)},
        "annotations": {RESOURCE: identity.key},
    }


def _job_spec(wanted: WantedDataset, template: Mapping[str, Any]) -> dict[str, Any]:
    pod = copy.deepcopy(dict(template["template"]))
    [container] = [each for each in pod["spec"]["containers"] if each["name"] == _CONTAINER]
    container["args"] = [text.replace("$", "$$") for text in wanted.arguments]
    return {
        "backoffLimit": _TRIES,
        "ttlSecondsAfterFinished": _KEEP_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [_WRONG_USAGE]},
                },
            ]
        },
        "template": pod,
    }
