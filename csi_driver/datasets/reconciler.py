"""Make what is as DataSet resources want it: names, access lists, Jobs and CronJobs; and write their status.

One thread, in the controller's process. It looks at everything, and again when a resource changes (a watch) or half a
minute later; it keeps nothing. All that it makes has a name that follows from the resource, or is decided by one
compare and set in the catalog. So a start after a kill goes on, two controllers do no harm, and a change that was
missed is found the next time. Snapshots are made by the Jobs, and no snapshot is ever removed.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import grpc

from csi_driver.datasets.grants import check_kind, check_source, claim_name, set_access
from csi_driver.datasets.resource import (
    GROUP,
    PLURAL,
    READY,
    VERSION,
    Condition,
    ResourceIdentity,
    WantedDataset,
    WrongSpecError,
    dataset_of,
    identity_of,
    wanted_of,
)
from csi_driver.datasets.runs import (
    UID_LABEL,
    EndedRun,
    cron_job_of,
    is_applied,
    is_of,
    is_under_way,
    job_of,
    newest_ended,
    run_of,
    words_of,
)
from csi_driver.kube import MERGE_PATCH, KubeApi
from csi_driver.resolve import BucketRules
from csi_driver.status import RequestError, precondition, status_of
from datacache.api import open_catalog
from datacache.core.errors import CatalogUnavailableError, DatacacheError
from datacache.manifest.model import SnapshotRecord
from datacache.settings import Settings, format_bytes

LOOK_EVERY_S = 30
"""Without a change; a run that ends is seen by then."""
LOOK_AT_RUNS_EVERY_S = 5
RETRY_S = 10.0
REST_S = 1.0
"""Between two looks, whoever changes resources how often."""
_END_S = 10.0
_ALL = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
_MANAGER = {"fieldManager": "datacache", "force": "true"}
_APPLY = "application/apply-patch+yaml"
_MAX_MESSAGE = 2000
_log = logging.getLogger(__name__)

Objects = dict[str, list[dict[str, Any]]]
"""Jobs, or CronJobs, by the uid of their resource."""


class DatasetReconciler:
    """The thread that serves DataSet resources, from `start` to `close`."""

    def __init__(self, settings: Settings, api: KubeApi, rules: BucketRules, template: str) -> None:
        """Take `template`, the PodTemplate of the Jobs, as `NAMESPACE/NAME`; Jobs run in its namespace."""
        self._settings, self._api, self._rules = settings, api, rules
        self._space, _, self._template_name = template.partition("/")
        self._catalog = open_catalog(settings)
        self._ended = threading.Event()
        self._watching = threading.Lock()  # guards _watch
        self._watch: Any = None
        self._thread = threading.Thread(target=self._work, name="datasets", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. A call of the API that hangs is left behind."""
        self._ended.set()
        with self._watching:
            if self._watch is not None:
                with suppress(ValueError, RuntimeError, OSError):  # it has ended by itself
                    self._watch.shutdown()
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        self._catalog.close()

    def _work(self) -> None:
        problem = ""
        while not self._ended.is_set():
            try:
                listed, running = self.reconcile()
                problem = ""
                self._wait_for_change(listed, LOOK_AT_RUNS_EVERY_S if running else LOOK_EVERY_S)
                self._ended.wait(REST_S)
            except (RequestError, DatacacheError) as exc:
                if str(exc) != problem:  # once, and not every ten seconds
                    problem = str(exc)
                    _log.warning("DataSets wait: %s", problem)
                self._ended.wait(RETRY_S)
            except Exception:  # noqa: BLE001  one surprise must not end the service of all others
                _log.exception("DataSets wait")
                self._ended.wait(RETRY_S)

    def reconcile(self) -> tuple[dict[str, Any], bool]:
        """Look at all resources once; return the list of them, and whether any Job runs.

        `RequestError` where the API is away or refuses, the catalog's errors. What is wrong with one resource is in its
        status.
        """
        # Before the resources: a Job that comes later, of a resource as new, must not look as if that were gone.
        jobs, cron_jobs = self._mine("jobs"), self._mine("cronjobs")
        listed = self._api.call("list DataSets", "GET", _ALL)
        if listed is None:
            raise precondition("the cluster has no resource datasets.datacache.io: install the chart with it")
        path = f"/api/v1/namespaces/{self._space}/podtemplates/{self._template_name}"
        template = self._api.call("read the PodTemplate of Jobs", "GET", path)
        if template is None:
            raise precondition(f"there is no PodTemplate {self._space}/{self._template_name}, which Jobs are made of")
        resources = sorted(listed["items"], key=_age)
        names = {identity_of(each).key: dataset_of(each) for each in resources}
        for each in resources:
            if self._ended.is_set():
                break
            uid = each["metadata"]["uid"]
            try:
                self._look_at(each, names, template, jobs=jobs[uid], cron_jobs=cron_jobs[uid])
            except CatalogUnavailableError:
                raise
            except RequestError as exc:
                if exc.code is not grpc.StatusCode.ABORTED:
                    _log.warning("DataSet %s: %s", identity_of(each).key, exc)
            except Exception:  # noqa: BLE001  a resource that surprises us is not to stop the others
                _log.exception("DataSet %s", identity_of(each).key)
        gone = {*jobs, *cron_jobs} - {each["metadata"]["uid"] for each in resources}
        for uid in gone:
            self._end(jobs[uid], cron_jobs[uid])
        running = any(is_under_way(job) for uid, each in jobs.items() if uid not in gone for job in each)
        return listed, running

    # --- one resource ------------------------------------------------------------------------------------------------

    def _look_at(
        self,
        resource: Mapping[str, Any],
        names: Mapping[str, str],
        template: Mapping[str, Any],
        *,
        jobs: list[dict[str, Any]],
        cron_jobs: list[dict[str, Any]],
    ) -> None:
        identity = identity_of(resource)
        status: dict[str, Any] = {"observedGeneration": identity.generation}
        try:
            wanted = wanted_of(resource)
            self._grant(identity, wanted, names, status)
            self._schedule(identity, wanted, template, cron_jobs)
        except CatalogUnavailableError:
            raise
        except (WrongSpecError, DatacacheError) as exc:
            self._end([job for job in jobs if is_under_way(job)], cron_jobs)
            reason = exc.reason if isinstance(exc, WrongSpecError) else "Refused"
            condition = Condition("False", reason, status_of(exc)[1])
            status |= dict.fromkeys(("run", "job", "snapshot", "lastScheduleTime"))
        else:
            run = run_of(identity, wanted)
            if not wanted.suspend:
                self._run(identity, wanted, template, jobs)
                status["run"] = run
            latest = self._latest(wanted.dataset)
            condition, job = self._condition(identity, run, jobs, latest)
            times = [(each.get("status") or {}).get("lastScheduleTime") for each in cron_jobs]
            status |= {"job": job, "lastScheduleTime": next(iter(times), None) if wanted.schedule else None}
            status["snapshot"] = None if latest is None else _described(latest)
        self._write(identity, status, condition)

    def _grant(
        self, identity: ResourceIdentity, wanted: WantedDataset, names: Mapping[str, str], status: dict[str, Any]
    ) -> None:
        """Give the resource its data set, and set who may have that and note it in `status`, or raise
        `WrongSpecError`."""
        check_source(wanted, identity.namespace, self._rules, self._settings)
        claim_name(self._catalog, identity, wanted, names, default=self._settings.access)
        if identity.status.get("accessGeneration") != identity.generation:
            # Once for what is written there: what an administrator sets afterwards stands.
            set_access(self._catalog, wanted)
            status["accessGeneration"] = identity.generation
        check_kind(self._catalog, wanted)

    def _schedule(
        self,
        identity: ResourceIdentity,
        wanted: WantedDataset,
        template: Mapping[str, Any],
        cron_jobs: Sequence[Mapping[str, Any]],
    ) -> None:
        if not wanted.schedule:
            self._end([], cron_jobs)
            return
        cron_job = cron_job_of(identity, wanted, template)
        if is_applied(next(iter(cron_jobs), None), cron_job):
            return
        path = f"{self._path('cronjobs')}/{cron_job['metadata']['name']}"
        try:
            self._api.call("accept spec.schedule", "PATCH", path, query=_MANAGER, body=cron_job, content_type=_APPLY)
        except RequestError as exc:
            if exc.code is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            raise WrongSpecError("WrongSchedule", exc.message) from exc

    def _run(
        self,
        identity: ResourceIdentity,
        wanted: WantedDataset,
        template: Mapping[str, Any],
        jobs: list[dict[str, Any]],
    ) -> None:
        """Have a snapshot made where another one is wanted than the last time."""
        run = run_of(identity, wanted)
        there = any(is_of(job, run) for job in jobs)
        lost = not there and identity.condition.get("reason") == "Running"  # somebody has deleted the Job
        if identity.status.get("run") == run and not lost:
            return
        outdated = [job for job in jobs if is_under_way(job) and not is_of(job, run)]
        self._end(outdated, [])
        jobs[:] = [job for job in jobs if job not in outdated]
        if not there:
            job = job_of(identity, wanted, template)
            made = self._api.call("make a Job", "POST", self._path("jobs"), body=job)
            _log.info("DataSet %s: the Job %s makes %s", identity.key, job["metadata"]["name"], wanted.dataset)
            jobs.append(made or job)

    def _condition(
        self, identity: ResourceIdentity, run: str, jobs: Sequence[Mapping[str, Any]], latest: SnapshotRecord | None
    ) -> tuple[Condition, str | None]:
        """Return the condition, and the Job that it is about. Without a Job of the run the one before stands."""
        before, noted = identity.condition, identity.status.get("job")
        current = [job for job in jobs if is_of(job, run)]
        ended = newest_ended(current)
        if ended is None and current:
            job = current[-1]["metadata"]["name"]
            return Condition("Unknown", "Running", f"the Job {job} makes the snapshot"), job
        if ended is None and identity.status.get("run") != run:
            return Condition("False", "Suspended", "no snapshot is made while spec.suspend is true"), None
        job = noted if ended is None else ended.job
        if before.get("reason") == "RunFailed" and job == noted:  # its pods, who know why, go in time
            return Condition("False", "RunFailed", str(before.get("message"))), job
        if ended is not None and ended.failed:
            return Condition("False", "RunFailed", self._why(ended)), job
        if latest is None:
            words = "the snapshot was removed from the catalog: another text in spec.run has it made again"
            return Condition("False", "NoSnapshot", words), job
        return Condition("True", "Made", f"{latest.ref} is what lay under {latest.origin}"), job

    def _why(self, run: EndedRun) -> str:
        """Return why a Job failed, with what to do."""
        path = f"/api/v1/namespaces/{self._space}/pods"
        query = {"labelSelector": f"batch.kubernetes.io/job-name={run.job}"}
        found = self._api.call("list pods", "GET", path, query=query)
        words = words_of((found or {}).get("items") or ())
        if not words:
            words = (
                f"the Job {run.job} failed ({run.reason or 'no reason given'}). Administrators see its log: kubectl "
            )
            words += f"-n {self._space} logs job/{run.job}"
        return (
            f"{words.removesuffix('.')}. It is tried again at the next time of spec.schedule, or with another spec.run"
        )

    def _latest(self, dataset: str) -> SnapshotRecord | None:
        found = self._catalog.dataset(dataset)
        return None if found is None else self._catalog.snapshot(dataset, found.latest)

    def _write(self, identity: ResourceIdentity, status: dict[str, Any], condition: Condition) -> None:
        before = identity.condition
        same = before.get("status") == condition.status
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        values = {"status": condition.status, "reason": condition.reason, "message": condition.message[:_MAX_MESSAGE]}
        since = {"lastTransitionTime": before.get("lastTransitionTime", now) if same else now}
        ready = {"type": READY, **values, "observedGeneration": identity.generation, **since}
        status["conditions"] = [ready]
        if all(identity.status.get(name) == value for name, value in status.items()):
            return
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{identity.namespace}/{PLURAL}/{identity.name}/status"
        # Only over what was read: the other controller's is newer.
        body = {"metadata": {"resourceVersion": identity.resource_version, "uid": identity.uid}, "status": status}
        self._api.call("write the status of a DataSet", "PATCH", path, body=body, content_type=MERGE_PATCH)

    # --- Jobs --------------------------------------------------------------------------------------------------------

    def _path(self, kind: str) -> str:
        return f"/apis/batch/v1/namespaces/{self._space}/{kind}"

    def _mine(self, kind: str) -> Objects:
        found: Objects = defaultdict(list)
        listed = self._api.call(f"list {kind}", "GET", self._path(kind), query={"labelSelector": UID_LABEL})
        for each in sorted(listed["items"] if listed else (), key=_age):
            found[each["metadata"]["labels"][UID_LABEL]].append(each)
        return found

    def _end(self, jobs: Sequence[Mapping[str, Any]], cron_jobs: Sequence[Mapping[str, Any]]) -> None:
        """Delete Jobs and CronJobs, with their pods. A creation that is killed leaves nothing to be seen."""
        for kind, objects in (("cronjobs", cron_jobs), ("jobs", jobs)):
            for each in objects:
                path = f"{self._path(kind)}/{each['metadata']['name']}"
                body = {"propagationPolicy": "Background", "preconditions": {"uid": each["metadata"]["uid"]}}
                self._api.call(f"delete {kind}", "DELETE", path, body=body)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _wait_for_change(self, listed: Mapping[str, Any], timeout_s: int) -> None:
        """Return when a resource is not as it was listed, when it cannot be told any more, or after so long."""
        seen = {each["metadata"]["uid"]: each["metadata"].get("generation") for each in listed["items"]}
        query = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
        query["timeoutSeconds"] = str(timeout_s)
        response = self._api.stream("watch DataSets", _ALL, query=query, silent_s=timeout_s + 5.0)
        if response is None:
            return
        from kubernetes.watch.watch import iter_resp_lines
        from urllib3.exceptions import HTTPError

        try:
            with self._watching:
                self._watch = response
            if self._ended.is_set():
                return
            with suppress(HTTPError, OSError, ValueError):  # cut off, or cut short: look again
                for line in iter_resp_lines(response):
                    event = json.loads(line)
                    metadata = event["object"].get("metadata") or {}
                    if event["type"] not in ("ADDED", "MODIFIED") or (
                        seen.get(metadata.get("uid"), -1) != metadata.get("generation")
                    ):
                        return
        finally:
            with self._watching:
                self._watch = None
            response.close()


def _age(each: Mapping[str, Any]) -> str:
    return str(each["metadata"].get("creationTimestamp"))


def _described(record: SnapshotRecord) -> dict[str, Any]:
    return {
        "ref": record.ref,
        "id": record.id,
        "entries": record.files,
        "bytes": record.total_bytes,
        "size": format_bytes(record.total_bytes),
        "time": record.created_at,
    }
