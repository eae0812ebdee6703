"""DataSet resources: what is made for them, for whom, how often, and what their status says. Jobs are run as they are
written, against a real catalog and a real store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from csi_driver.datasets import reconciler as module
from csi_driver.datasets.reconciler import DatasetReconciler
from csi_driver.kube import KubeApi
from csi_driver.resolve import BucketRules
from datacache import api
from datacache.catalog.access import access_of, set_access
from datacache.catalog.assigned import assign, assigned_to
from datacache.catalog.base import Catalog
from datacache.settings import Settings, load_settings
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.dataset_api import SPACE, TEMPLATE, ClusterApi, expand
from tests.promises import promise
from tests.servers import RcloneS3

Start = Callable[..., DatasetReconciler]


@pytest.fixture
def store(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket whose prefixes are of namespaces, with `team-a/mask/` in it."""
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = rclone_s3.make_bucket(f"lab-{os.urandom(6).hex()}")
    for name in ("team-a/mask/a.jpg", "team-a/other/a.jpg", "team-b/mask/b.jpg"):
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_text(name)
    return bucket


@pytest.fixture
def cluster(store: Path) -> Iterator[ClusterApi]:
    """The API of a cluster with DataSets."""
    served = ClusterApi()
    yield served
    served.close()


@pytest.fixture
def start(cluster: ClusterApi, store: Path, home: Path, tmp_path: Path) -> Iterator[Start]:
    """Make reconcilers whose threads are not started."""
    made: list[DatasetReconciler] = []

    def make(settings: Settings | None = None) -> DatasetReconciler:
        rules = BucketRules([f"s3://{store.name}/${{pvc.namespace}}/"])
        kube = KubeApi(cluster.write_kubeconfig(tmp_path / "kubeconfig"))
        made.append(DatasetReconciler(settings or load_settings(), kube, rules, f"{SPACE}/{TEMPLATE}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def catalog(home: Path) -> Iterator[Catalog]:
    opened = api.open_catalog(load_settings())
    yield opened
    opened.close()


def mask(store: Path, **more: Any) -> dict[str, Any]:
    return {"name": "mask", "source": f"s3://{store.name}/team-a/mask"} | more


def test_a_resource_becomes_a_snapshot_by_a_job_and_its_status_names_it(
    any_catalog: str, store: Path, cluster: ClusterApi, start: Start
) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store, tags=["prod", "v1"], access={"allow": ["team-b"]}))
    reconciler.reconcile()
    [job] = cluster.all("jobs")
    assert cluster.ready("faces")[:2] == ("Unknown", "Running")
    done = cluster.run(job)
    assert done.returncode == 0, done.stderr
    reconciler.reconcile()
    catalog = api.open_catalog()
    record = api.resolve(catalog, "mask@prod")
    assert api.resolve(catalog, "mask@v1") == record
    assert str(access_of(catalog, "mask", default="all")) == "team-a, team-b"
    assert cluster.ready("faces")[:2] == ("True", "Made")
    assert record.ref in cluster.ready("faces")[2]
    status = cluster.status("faces")
    assert status["snapshot"] == {
        "ref": record.ref,
        "id": record.id,
        "entries": 1,
        "bytes": 17,
        "size": "17 B",
        "time": record.created_at,
    }
    assert (status["observedGeneration"], status["job"]) == (1, job["metadata"]["name"])
    before = len(cluster.requests)
    reconciler.reconcile()
    assert not [each for each in cluster.requests[before:] if not each.startswith("GET")], "nothing has changed"
    catalog.close()


def test_a_changed_specification_is_one_run_and_one_that_makes_the_same_is_none(
    store: Path, cluster: ClusterApi, start: Start, catalog: Catalog
) -> None:
    reconciler = start()

    def look(**spec: Any) -> list[str]:
        cluster.apply("faces", mask(store, **spec))
        reconciler.reconcile()
        reconciler.reconcile()
        return [each["metadata"]["name"] for each in cluster.all("jobs")]

    [first] = look()
    cluster.run(cluster.all("jobs")[0])
    assert look(access={"everybody": True, "deny": ["guests"]}) == [first]
    assert str(access_of(catalog, "mask", default="all")) == "all namespaces but guests"
    assert cluster.ready("faces")[1] == "Made"
    [_, second] = look(tags=["v2"])
    assert cluster.ready("faces")[1] == "Running"
    # As it was before, it is another run: what is newest by now is of other words.
    names = look()
    assert second not in names, "a run that nobody wants any more is ended"
    assert len(names) == 2
    cluster.run(cluster.all("jobs")[-1])
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "Made"
    assert len(look(run="2026-11-29")) == 3


def test_a_schedule_is_a_cron_job_that_makes_the_same_and_goes_with_the_resource(
    store: Path, cluster: ClusterApi, start: Start
) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store, schedule="17 3 * * *", timeZone="Europe/Berlin"))
    reconciler.reconcile()
    [job], [cron_job] = cluster.all("jobs"), cluster.all("cronjobs")
    spec = cron_job["spec"]
    assert (spec["schedule"], spec["timeZone"], spec["concurrencyPolicy"]) == ("17 3 * * *", "Europe/Berlin", "Forbid")
    assert spec["jobTemplate"]["spec"] == job["spec"]
    assert cluster.run(job).returncode == 0
    reconciler.reconcile()
    first = cluster.status("faces")["snapshot"]["id"]
    (store / "team-a" / "mask" / "more.jpg").write_text("more")
    scheduled = cluster.start_scheduled(cron_job, 1)
    reconciler.reconcile()
    assert cluster.ready("faces")[:2] == ("True", "Made"), "what was made stays ready while the next is made"
    assert cluster.run(scheduled).returncode == 0
    reconciler.reconcile()
    status = cluster.status("faces")
    assert status["snapshot"]["entries"] == 2
    assert (status["lastScheduleTime"], status["job"]) == ("2026-01-02T03:17:01Z", scheduled["metadata"]["name"])
    assert status["snapshot"]["id"] != first
    assert len(cluster.all("cronjobs")) == 1

    cluster.apply("faces", mask(store, schedule="17 3 * * *", suspend=True))
    reconciler.reconcile()
    [cron_job] = cluster.all("cronjobs")
    assert cron_job["spec"]["suspend"] is True
    assert cluster.ready("faces")[:2] == ("True", "Made")
    cluster.apply("faces", mask(store, schedule="at midnight"))
    reconciler.reconcile()
    status, reason, words = cluster.ready("faces")
    assert (status, reason) == ("False", "WrongSchedule")
    assert "spec.schedule: Invalid value" in words
    assert cluster.all("cronjobs") == []
    cluster.apply("faces", mask(store))
    reconciler.reconcile()
    assert cluster.ready("faces")[:2] == ("Unknown", "Running"), "after a refusal it begins again"


@promise("Deleting a DataSet removes no snapshot, and its name goes to no other namespace")
def test_deleting_a_resource_ends_its_jobs_and_removes_no_snapshot_and_its_name_stays(
    store: Path, cluster: ClusterApi, start: Start
) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store, schedule="@daily", access={"everybody": True}))
    reconciler.reconcile()
    cluster.run(cluster.all("jobs")[0])
    cluster.start_scheduled(cluster.all("cronjobs")[0], 1)
    cluster.remove("datasets", "team-a", "faces")
    cluster.apply("mine-now", {"name": "mask", "source": f"s3://{store.name}/team-b/mask"}, namespace="team-b")
    reconciler.reconcile()
    assert cluster.all("cronjobs") == cluster.all("jobs") == []
    catalog = api.open_catalog()
    assert catalog.dataset("mask") is not None
    catalog.close()
    assert cluster.ready("mine-now", namespace="team-b")[1] == "NameTaken"
    cluster.apply("faces-2", mask(store))  # in the namespace that had it
    reconciler.reconcile()
    assert cluster.ready("faces-2")[1] == "Running"


@promise("A data set has one DataSet, the first that named it")
def test_of_two_resources_with_one_name_the_first_keeps_it(
    any_catalog: str, store: Path, cluster: ClusterApi, start: Start
) -> None:
    reconcilers = [start(), start()]
    for team in ("team-b", "team-a", "team-c"):
        cluster.apply("faces", {"name": "mask", "source": f"s3://{store.name}/{team}/mask"}, namespace=team)
    cluster.apply("again", {"name": "mask", "source": f"s3://{store.name}/team-b/mask"}, namespace="team-b")
    with ThreadPoolExecutor(2) as pool:  # two controllers at once
        for call in [pool.submit(each.reconcile) for each in reconcilers]:
            call.result()
    reconcilers[0].reconcile()
    [job] = cluster.all("jobs")
    assert f"--from=s3://{store.name}/team-b/mask/" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert cluster.ready("faces", namespace="team-b")[1] == "Running"
    status, reason, words = cluster.ready("faces")
    assert (status, reason) == ("False", "NameTaken")
    assert "dsctl k8s assign mask team-a/faces" in words
    assert "team-b" not in words
    assert "team-b/faces makes mask already" in cluster.ready("again", namespace="team-b")[2]
    catalog = api.open_catalog()
    assert assigned_to(catalog, "mask") == "team-b/faces"
    # An administrator decides otherwise.
    assert assign(catalog, "mask", "team-a/faces")
    catalog.close()
    reconcilers[1].reconcile()
    assert cluster.ready("faces")[1] == "Running"
    assert cluster.ready("faces", namespace="team-b")[1] == "NameTaken"
    [job] = cluster.all("jobs")
    assert f"--from=s3://{store.name}/team-a/mask/" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_a_job_that_another_controller_makes_during_a_look_stays(
    store: Path, cluster: ClusterApi, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    call = KubeApi.call

    def call_and_be_late(self: KubeApi, what: str, *args: Any, **options: Any) -> Any:
        answer = call(self, what, *args, **options)
        if what == "list DataSets":
            monkeypatch.setattr(KubeApi, "call", call)
            cluster.apply("faces", mask(store))
            second.reconcile()
        return answer

    monkeypatch.setattr(KubeApi, "call", call_and_be_late)
    first.reconcile()
    assert len(cluster.all("jobs")) == 1


def test_a_data_set_that_somebody_else_has_made_is_not_taken_over_nor_told_of(
    store: Path, cluster: ClusterApi, start: Start, catalog: Catalog, settings: Settings
) -> None:
    api.create_snapshot("mask", f"s3://{store.name}/team-b/mask", tags=["v1"])
    before = catalog.dataset("mask")
    reconciler = start()
    cluster.apply("faces", mask(store, tags=["v1"], replace=True, access={"everybody": True}))
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "NameTaken"
    set_access(catalog, "mask", everybody=False)
    cluster.apply("faces", mask(store, tags=["v1"], replace=True, access={"everybody": True, "deny": ["x"]}))
    reconciler.reconcile()
    status, reason, words = cluster.ready("faces")
    assert (status, reason) == ("False", "AccessDenied")
    assert "is not open to namespace team-a" in words
    assert "already" not in words
    assert str(access_of(catalog, "mask", default="all")) == "no namespace"
    assert cluster.all("jobs") == []
    assert "snapshot" not in cluster.status("faces")
    assert catalog.dataset("mask") == before
    assert assigned_to(catalog, "mask") == ""


def test_an_administrator_who_closes_a_data_set_to_its_own_resource_ends_that(
    store: Path, cluster: ClusterApi, start: Start, catalog: Catalog
) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store, schedule="@hourly", access={"allow": ["team-b"]}))
    reconciler.reconcile()
    set_access(catalog, "mask", everybody=False)
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "AccessDenied"
    assert cluster.all("jobs") == cluster.all("cronjobs") == []
    cluster.apply("faces", mask(store, access={"everybody": True}))
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "AccessDenied"
    assert str(access_of(catalog, "mask", default="all")) == "no namespace"
    set_access(catalog, "mask", allow=["team-a"])
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "Running"
    assert str(access_of(catalog, "mask", default="all")) == "all namespaces"


@pytest.mark.parametrize("suspend", [False, True])
def test_a_list_that_an_administrator_has_set_stands_also_after_the_resource_was_refused(
    store: Path, cluster: ClusterApi, start: Start, catalog: Catalog, suspend: bool
) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store, access={"everybody": True}, suspend=suspend))
    reconciler.reconcile()
    set_access(catalog, "mask", everybody=False)
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "AccessDenied"
    set_access(catalog, "mask", allow=["team-a"])
    for _ in range(2):
        reconciler.reconcile()
        assert cluster.ready("faces")[1] == ("Suspended" if suspend else "Running")
        assert str(access_of(catalog, "mask", default="all")) == "team-a"


def test_where_data_sets_are_closed_by_default_one_is_open_to_its_own_namespace_before_it_can_be_seen(
    store: Path, cluster: ClusterApi, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_ACCESS", "none")
    catalog = api.open_catalog()
    reconciler = start()
    cluster.apply("faces", mask(store))
    reconciler.reconcile()
    assert catalog.dataset("mask") is None
    assert str(access_of(catalog, "mask", default="none")) == "team-a"
    catalog.close()


CLOSED = [
    "s3://{bucket}/team-b/mask",
    "s3://{bucket}",
    "s3://{bucket}/team-a-too/",
    "s3://{bucket}/team-a/../team-b/mask",
    "s3://{bucket}/TEAM-A/mask",
    "s3://elsewhere/team-a/mask",
    "file:///proc/self/",
    "/proc/self",
    "https://{bucket}/team-a/",
    "s3://key:secret@{bucket}/team-a/",
    "s3://{bucket}/team-a/\n--replace",
    "datacache://mask@v1",
    "",
]


@promise("A DataSet names only sources that its namespace may have")
def test_sources_that_are_not_open_to_the_namespace_are_refused(store: Path, cluster: ClusterApi, start: Start) -> None:
    put_past_the_schema(cluster, "open", {"source": f"s3://{store.name}/team-a"})
    for number, source in enumerate(CLOSED):
        put_past_the_schema(cluster, f"closed-{number}", {"source": source.format(bucket=store.name)})
    start().reconcile()
    assert cluster.ready("open")[1] == "Running"
    assert len(cluster.all("jobs")) == 1
    for number, source in enumerate(CLOSED):
        status, reason, words = cluster.ready(f"closed-{number}")
        assert (status, reason in ("SourceNotAllowed", "WrongSpec")) == ("False", True), source
        assert "secret" not in words


def put_past_the_schema(cluster: ClusterApi, name: str, spec: object) -> None:
    """Keep a DataSet that the schema refuses; a cluster may have an older one."""
    body = {"apiVersion": "datacache.io/v1alpha1", "kind": "DataSet", "spec": spec}
    cluster.put("datasets", body | {"metadata": {"namespace": "team-a", "name": name}})


def test_a_source_that_is_closed_again_ends_its_schedule(store: Path, cluster: ClusterApi, start: Start) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store, schedule="@hourly"))
    reconciler.reconcile()
    assert len(cluster.all("cronjobs")) == 1
    reconciler._rules = BucketRules([])
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "SourceNotAllowed"
    assert "none is open" in cluster.ready("faces")[2]
    assert cluster.all("jobs") == cluster.all("cronjobs") == []


HOSTILE: list[dict[str, Any]] = [
    {"name": "--json"},
    {"name": "mask\nfaces"},
    {"tags": ["v1\n--replace"]},
    {"tags": ["$(MONGODB_PASSWORD)"]},
    {"tags": ["latest"]},
    {"tags": "v1"},
    {"copy": "yes"},
    {"access": {"allow": ["Team B"]}},
    {"access": [1]},
    {"schedule": 5},
]
HOSTILE_BY_RULES: list[dict[str, Any]] = [
    {"access": {"allow": ["team-b"], "everybody": True}},
    {"access": {"deny": ["team-b"]}},
]
"""Refused by CEL rules, which a test cannot run, and by us."""


def test_fields_that_cannot_be_are_refused_by_the_schema_and_by_the_controller_which_goes_on(
    store: Path, cluster: ClusterApi, start: Start
) -> None:
    for wrong in HOSTILE:
        with pytest.raises(jsonschema.ValidationError):
            cluster.apply("faces", mask(store) | wrong)
    for number, wrong in enumerate([*HOSTILE, *HOSTILE_BY_RULES]):
        put_past_the_schema(cluster, f"wrong-{number}", mask(store) | wrong)
    put_past_the_schema(cluster, "no-mapping", "s3://bucket/")
    cluster.apply("good", mask(store))
    start().reconcile()
    for number, wrong in enumerate([*HOSTILE, *HOSTILE_BY_RULES]):
        assert cluster.ready(f"wrong-{number}")[:2] == ("False", "WrongSpec"), wrong
    assert cluster.ready("good")[1] == "Running"
    assert len(cluster.all("jobs")) == 1


def test_no_variable_of_the_jobs_pod_gets_into_a_name_that_its_namespace_can_read(
    store: Path, cluster: ClusterApi, start: Start
) -> None:
    place = "team-a/$(MONGODB_PASSWORD) $$(HOME) `id` $HOME;x"
    (store / place).mkdir(parents=True)
    (store / place / "a.jpg").write_text("a")
    cluster.apply("faces", {"source": f"s3://{store.name}/{place}"})
    reconciler = start()
    reconciler.reconcile()
    [job] = cluster.all("jobs")
    done = cluster.run(job)
    assert done.returncode == 0, done.stderr
    reconciler.reconcile()
    assert cluster.ready("faces")[2].endswith(f"s3://{store.name}/{place}/")
    assert expand("$(A)", {"A": "secret"}) == "secret", "as a kubelet does"
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["dsctl"], "no shell"


def test_a_run_that_fails_says_why_in_the_words_of_the_command(
    store: Path, cluster: ClusterApi, start: Start, catalog: Catalog
) -> None:
    reconciler = start()
    cluster.apply("faces", {"name": "mask", "source": f"s3://{store.name}/team-a/nothing"})
    reconciler.reconcile()
    assert cluster.run(cluster.all("jobs")[0]).returncode == 1
    reconciler.reconcile()
    status, reason, words = cluster.ready("faces")
    assert (status, reason) == ("False", "RunFailed")
    assert f"there is nothing under s3://{store.name}/team-a/nothing/. Check" in words
    assert "spec.run" in words
    since = cluster.status("faces")["conditions"][0]["lastTransitionTime"]
    for key in [key for key in cluster.objects if key[0] in ("pods", "jobs")]:  # as time does
        cluster.remove(*key)
    reconciler.reconcile()
    assert cluster.ready("faces") == (status, reason, words)
    assert cluster.status("faces")["conditions"][0]["lastTransitionTime"] == since
    assert cluster.all("jobs") == [], "a run that failed is not begun again by itself"

    cluster.apply("faces", mask(store, run="2"))
    reconciler.reconcile()
    [job] = cluster.all("jobs")
    cluster.end(job, failed=True, said="Traceback: a password in a log\n", reason="DeadlineExceeded")
    reconciler.reconcile()
    assert "password" not in cluster.ready("faces")[2]
    assert "DeadlineExceeded" in cluster.ready("faces")[2]


def test_another_source_under_the_same_name_is_refused_unless_it_is_meant(
    store: Path, cluster: ClusterApi, start: Start
) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store))
    reconciler.reconcile()
    cluster.run(cluster.all("jobs")[0])
    other = f"s3://{store.name}/team-a/other"
    cluster.apply("faces", mask(store, source=other))
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "OtherKind"
    assert "spec.replace: true" in cluster.ready("faces")[2]
    cluster.apply("faces", mask(store, source=other, replace=True))
    reconciler.reconcile()
    assert cluster.run(cluster.all("jobs")[-1]).returncode == 0
    reconciler.reconcile()
    assert cluster.ready("faces")[2].endswith(f"{other}/")


def test_copies_need_a_place_that_an_administrator_names(
    store: Path, cluster: ClusterApi, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATACACHE_OBJECTS", raising=False)
    cluster.apply("faces", mask(store, copy=True))
    start(load_settings() if load_settings().objects is None else None).reconcile()
    if cluster.ready("faces")[1] == "NoPlaceForCopies":
        assert "DATACACHE_OBJECTS" in cluster.ready("faces")[2]
    monkeypatch.setenv("DATACACHE_OBJECTS", f"file://{tmp_path}/objects")
    reconciler = start()
    reconciler.reconcile()
    [job] = cluster.all("jobs")
    assert cluster.run(job).returncode == 0
    reconciler.reconcile()
    assert cluster.ready("faces")[1] == "Made"
    assert any((tmp_path / "objects").rglob("*"))


def test_a_job_that_somebody_deletes_is_made_again(store: Path, cluster: ClusterApi, start: Start) -> None:
    reconciler = start()
    cluster.apply("faces", mask(store))
    reconciler.reconcile()
    [job] = cluster.all("jobs")
    cluster.remove("jobs", SPACE, job["metadata"]["name"])
    reconciler.reconcile()
    [again] = cluster.all("jobs")
    assert again["metadata"]["name"] == job["metadata"]["name"]


def test_a_status_that_another_controller_has_written_is_not_written_over(
    store: Path, cluster: ClusterApi, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    cluster.apply("faces", mask(store))
    write = first._write

    def late(*arguments: Any) -> None:
        second.reconcile()
        cluster.run(cluster.all("jobs")[0])
        second.reconcile()
        write(*arguments)

    monkeypatch.setattr(first, "_write", late)
    first.reconcile()
    assert cluster.ready("faces")[1] == "Made"
    assert len(cluster.all("jobs")) == 1


def test_changes_are_seen_at_once_by_a_watch_that_begins_anew_when_it_is_too_old(
    store: Path, cluster: ClusterApi, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REST_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 300)
    monkeypatch.setattr(module, "LOOK_AT_RUNS_EVERY_S", 300)
    reconciler = start()
    reconciler.start()
    cluster.wait_for("watch=true")
    cluster.apply("one", {"source": f"s3://{store.name}/team-a/mask"})
    cluster.wait_until(lambda: cluster.status("one"))
    cluster.expire()
    cluster.wait_until(lambda: sum("watch=true" in each for each in cluster.requests) > 3)
    cluster.apply("two", {"source": f"s3://{store.name}/team-a/mask"})
    cluster.wait_until(lambda: cluster.status("two"))
    cluster.expire(False)
    cluster.fail, cluster.failing = 500, "/"  # the API is away
    cluster.apply("three", {"source": f"s3://{store.name}/team-a/mask"})
    before = len(cluster.requests)
    cluster.wait_until(lambda: len(cluster.requests) > before + 2)
    cluster.fail = 0
    cluster.wait_until(lambda: cluster.status("three"))
    reconciler.close()
    assert not reconciler._thread.is_alive()
    assert len(cluster.all("jobs")) == 3


def test_a_controller_that_is_killed_anywhere_goes_on_with_one_job_a_run(
    store: Path, cluster: ClusterApi, start_driver: StartDriver, tmp_path: Path
) -> None:
    options = (
        "--mode=controller",
        f"--kubeconfig={cluster.write_kubeconfig(tmp_path / 'kubeconfig')}",
        f"--datasets={SPACE}/{TEMPLATE}",
        f"--dataset-source=s3://{store.name}/${{pvc.namespace}}/",
    )
    driver = start_driver(*options)
    for number, stop_at in enumerate(("POST", "jobs", "status")):
        seen = len(cluster.requests)
        cluster.apply("faces", mask(store, run=str(number)))
        cluster.wait_until(lambda stop_at=stop_at, seen=seen: any(stop_at in each for each in cluster.requests[seen:]))
        driver.kill()
        driver.start()
        cluster.wait_until(lambda number=number: cluster.status("faces").get("observedGeneration") == number + 1)
        [job] = [each for each in cluster.all("jobs") if "status" not in each]
        assert cluster.run(job).returncode == 0
    assert len(cluster.all("jobs")) == 3
    assert driver.client.Probe().ready.value
    assert driver.stop() == 0


def test_a_controller_without_the_resource_or_its_template_says_so_and_provisions_volumes(
    store: Path, cluster: ClusterApi, start_driver: StartDriver, tmp_path: Path
) -> None:
    cluster.remove("podtemplates", SPACE, TEMPLATE)
    kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")
    driver = start_driver("--mode=controller", f"--kubeconfig={kubeconfig}", f"--datasets={SPACE}/{TEMPLATE}")
    cluster.wait_for("podtemplates")
    assert driver.client.code("ListVolumes")[0] == "OK"
    assert driver.stop() == 0
    assert "there is no PodTemplate" in driver.text


def test_closing_ends_a_watch_that_hangs(
    store: Path, cluster: ClusterApi, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 300)
    reconciler = start()
    reconciler.start()
    cluster.wait_for("watch=true")
    ended = threading.Event()
    threading.Thread(target=lambda: (reconciler.close(), ended.set())).start()
    assert ended.wait(60)
    assert not reconciler._thread.is_alive()
