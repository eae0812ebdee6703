"""Test what a PVC's annotations come to, over the API of a stand-in cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from csi_driver.resolve import BucketRules
from csi_driver.status import RequestError
from csi_driver.volumes import parse_context, read_request
from csi_driver.wire import csi_pb2 as csi
from datacache import api
from datacache.catalog.access import set_access
from datacache.core.errors import SettingsError
from datacache.settings import Settings, load_settings
from tests.csi_driver.api_server import TOKEN, ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import READ, WRITE, Driver
from tests.csi_driver.kubelet import make_masks

NAME = "pvc-0f4d0000-0000-4000-8000-000000000001"
"""As the provisioner makes it of the uid of `ApiServer.put_claim`."""


def ask(driver: Driver, parameters: dict[str, str], capabilities: Any = READ, **fields: Any) -> tuple[str, str]:
    fields = {"name": NAME, "volume_capabilities": capabilities, "parameters": parameters} | fields
    return driver.client.code("CreateVolume", csi.CreateVolumeRequest(**fields))


def context(driver: Driver, parameters: dict[str, str], capabilities: Any = READ) -> dict[str, str]:
    answer = driver.client.CreateVolume(name=NAME, volume_capabilities=capabilities, parameters=parameters)
    driver.client.DeleteVolume(volume_id=answer.volume.volume_id)
    return dict(answer.volume.volume_context)


# --- what goes before what ---


def test_annotations_go_before_parameters() -> None:
    spec, own, _ = read_request({"dataset": "mask", "warm": "true"}, {"datacache.io/warm": "wait", "other/warm": "x"})
    assert (spec.dataset, spec.warm, own) == ("mask@latest", "wait", False)


@pytest.mark.parametrize("given", ["dataset", "bucket"])
def test_an_annotation_takes_the_place_of_what_the_class_names_and_says_about_it(given: str) -> None:
    value = {"dataset": "mask@v1", "bucket": "s3://lab/out"}[given]
    for parameters in ({"dataset": "face", "warm": "wait", "subpath": "a"}, {"bucket": "s3://all", "subpath": "a"}):
        spec, own, _ = read_request(parameters, {f"datacache.io/{given}": value})
        assert (spec.dataset or spec.bucket).rstrip("/") == value
        assert (spec.subpath, own) == ("", given == "bucket")


def test_a_subpath_stays_inside_the_one_of_the_class() -> None:
    spec, own, _ = read_request({"bucket": "s3://all", "subpath": "open/"}, {"datacache.io/subpath": "mine"})
    assert (spec.subpath, own) == ("open/mine", False)
    with pytest.raises(RequestError, match="subpath"):
        read_request({"bucket": "s3://all", "subpath": "open"}, {"datacache.io/subpath": "../closed"})


def test_a_class_puts_the_claim_into_its_bucket() -> None:
    spec, own, _ = read_request({"bucket": "s3://all/${pvc.namespace}/${pvc.name}"}, {}, namespace="lab", name="out")
    assert (spec.bucket, own) == ("s3://all/lab/out/", False)


def test_places_in_an_annotation_are_not_filled_in() -> None:
    spec, *_ = read_request({}, {"datacache.io/bucket": "s3://all/${pvc.namespace}"}, namespace="lab", name="out")
    assert spec.bucket == "s3://all/${pvc.namespace}/"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("datacache.io/datset", "did you mean datacache.io/dataset?"),
        ("datacache.io/Warm", "did you mean datacache.io/warm?"),
        ("datacache.io/xyz", "there are datacache.io/dataset, datacache.io/bucket"),
    ],
)
def test_a_misspelt_annotation_is_named_with_the_nearest(key: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_request({"dataset": "mask"}, {key: "x"})
    assert key in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("prefixes", "url", "allowed"),
    [
        ([], "s3://lab/x", False),
        (["*"], "s3://lab/x", True),
        (["*"], "file:///etc", False),
        (["*"], "local://etc/x", False),
        (["*"], "reference://etc/x", False),
        (["file:///srv"], "file:///srv/x", True),
        (["file:///srv"], "file:///srv/../etc", False),
        (["s3://lab"], "s3://lab/x", True),
        (["s3://lab"], "s3://labs/x", False),
        (["s3://lab/x"], "s3://lab", False),
        (["s3://lab/x"], "s3://lab/xy", False),
        (["s3://all/${pvc.namespace}"], "s3://all/team/deep", True),
        (["s3://all/${pvc.namespace}"], "s3://all/other", False),
        (["s3://a", "s3a://lab/x/"], "s3://lab/x", True),
    ],
)
def test_a_bucket_is_open_if_it_lies_in_an_allowed_prefix(prefixes: list[str], url: str, allowed: bool) -> None:
    assert BucketRules(prefixes).allow(url, "team") is allowed


def test_a_prefix_with_a_namespace_opens_nothing_to_an_unknown_one() -> None:
    assert not BucketRules(["s3://all/${pvc.namespace}"]).allow("s3://all/team", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("subpath", "/a"),
        ("subpath", "a/../b"),
        ("subpath", "a\0b"),
        ("bucket", "s3://lab/../b"),
        ("bucket", "s3://lab/a/./b"),
        ("bucket", "s3://lab/a/.."),
        ("credentials", "none"),
        ("asked", "mask@v1"),
    ],
)
def test_a_place_that_may_lead_elsewhere_is_refused(name: str, text: str) -> None:
    with pytest.raises(RequestError, match=name):
        parse_context({"bucket": "s3://lab/out", name: text})


def test_a_volume_was_asked_for_by_the_name_that_it_has() -> None:
    assert parse_context({"dataset": "mask@v1", "asked": "mask@latest"}).asked == "mask@latest"
    with pytest.raises(RequestError, match="asked"):
        parse_context({"dataset": "mask@v1", "asked": "face@v1"})


@pytest.mark.parametrize("bucket", ["s3://key:hunter2@lab/out", "s3://hunter2@lab/out"])
def test_credentials_in_a_buckets_name_are_not_repeated(bucket: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_context({"bucket": bucket})
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("prefix", ["s3://all/${pod.name}", "s3://k:s@lab", "s3://"])
def test_a_wrong_prefix_is_refused_at_the_start(prefix: str) -> None:
    with pytest.raises(SettingsError, match="allowed bucket"):
        BucketRules([prefix])


# --- over the API ---


class World(NamedTuple):
    """One driver for the tests below, the cluster it asks, and what is in its catalog."""

    driver: Driver
    cluster: ApiServer
    masks: dict[str, str]
    settings: Settings


@pytest.fixture(scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    variables = {"DATACACHE_HOME": str(tmp_path_factory.mktemp("home"))}
    settings, cluster = load_settings(variables), ApiServer()
    masks = make_masks(tmp_path_factory.mktemp("masks"), settings)
    kubeconfig = cluster.write_kubeconfig(tmp_path_factory.mktemp("kube") / "config")
    options = ("--mode=controller", f"--kubeconfig={kubeconfig}", "--allow-bucket=s3://all/${pvc.namespace}")
    with Driver(tmp_path_factory.mktemp("csi"), *options, variables=variables) as driver:
        yield World(driver, cluster, masks, settings)
    cluster.close()


@pytest.fixture
def world(_world: World) -> Iterator[World]:
    yield _world
    _world.cluster.clear()
    for entry in _world.driver.client.ListVolumes().entries:
        _world.driver.client.DeleteVolume(volume_id=entry.volume.volume_id)


def test_an_annotation_becomes_a_volume_of_exactly_one_snapshot(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v2", "datacache.io/subpath": "train"})
    volume = driver.client.CreateVolume(name=NAME, volume_capabilities=READ, parameters=claim).volume
    expected = {"dataset": f"mask@{world.masks['v2']}", "asked": "mask@v2", "subpath": "train", "namespace": "lab"}
    assert dict(volume.volume_context) == expected
    assert parse_context(expected).dataset == expected["dataset"]

    # The tag moves, and the PVC is changed, and gone: the volume stays what it was decided to be.
    catalog = api.open_catalog(world.settings)
    catalog.set_tag("mask", "v2", world.masks["v3"], move=True)
    cluster.put_claim("faces", {"datacache.io/dataset": "mask@v3"})
    again = driver.client.CreateVolume(name=NAME, volume_capabilities=READ, parameters=claim).volume
    assert again == volume
    cluster.claims.clear()
    assert driver.client.CreateVolume(name=NAME, volume_capabilities=READ, parameters=claim).volume == volume
    catalog.set_tag("mask", "v2", world.masks["v2"], move=True)
    catalog.close()


def test_a_volume_grows_by_what_its_class_has_now(world: World) -> None:
    driver, cluster, gib = world.driver, world.cluster, 2**30
    parameters = {"bucket": "s3://lab/${pvc.name}", "capacity": "10Gi"}
    cluster.put_class("runs", parameters)
    claim = cluster.put_claim("faces", {}, storage_class="runs") | parameters
    size = csi.CapacityRange(required_bytes=8 * gib)
    driver.client.CreateVolume(name=NAME, volume_capabilities=WRITE, parameters=claim, capacity_range=size)
    grow = csi.ControllerExpandVolumeRequest(volume_id=NAME, capacity_range={"required_bytes": 12 * gib})
    code, words = driver.client.code("ControllerExpandVolume", grow)
    assert (code, "capacity of 10Gi" in words) == ("OUT_OF_RANGE", True)
    cluster.put_class("runs", parameters | {"capacity": "20Gi"})
    assert driver.client.ControllerExpandVolume(grow).capacity_bytes == 12 * gib
    cluster.put_class("runs", parameters | {"capacity": "13Gi"})
    grow.capacity_range.required_bytes = 14 * gib
    assert driver.client.code("ControllerExpandVolume", grow)[0] == "OUT_OF_RANGE"


def test_an_event_that_is_counted_costs_one_call(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v7"})
    before = len(cluster.requests)
    for _ in range(3):
        ask(driver, claim)
    calls = [request.partition(" ")[0] for request in cluster.requests[before:] if "/events" in request]
    assert calls == ["POST", "PATCH", "PATCH"]
    assert [event["count"] for event in cluster.events.values()] == [3]


def test_a_wrong_annotation_is_an_event_on_the_pvc_that_is_counted(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v9"})
    for _ in range(3):
        assert ask(driver, claim) == ("FAILED_PRECONDITION", "mask has no tag v9; it has v1, v2, v3")
    (event,) = cluster.events.values()
    assert (event["reason"], event["type"], event["count"]) == ("WrongAnnotation", "Warning", 3)
    assert event["message"] == "mask has no tag v9; it has v1, v2, v3"
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "namespace": "lab",
        "name": "faces",
        "uid": "0f4d0000-0000-4000-8000-000000000001",
    }
    assert event["firstTimestamp"] <= event["lastTimestamp"]

    driver.kill()
    driver.start()
    ask(driver, claim)  # counted on from what an earlier driver has written
    assert [event["count"] for event in cluster.events.values()] == [4]
    cluster.events.clear()  # as a cluster does after an hour
    ask(driver, claim)
    assert [event["count"] for event in cluster.events.values()] == [1]
    # No right to read Events is needed.
    assert not [request for request in cluster.requests if request.startswith("GET") and "/events" in request]

    cluster.put_claim("faces", {"datacache.io/datset": "mask@v1"})
    assert ask(driver, claim)[0] == "FAILED_PRECONDITION"
    assert len(cluster.events) == 2
    assert not driver.client.ListVolumes().entries


WRONG: list[tuple[dict[str, str], str]] = [
    ({"datacache.io/dataset": "mosk@v1"}, "there is no data set mosk; did you mean mask?"),
    ({"datacache.io/dataset": "birds"}, "there is no data set birds; there are mask"),
    ({"datacache.io/dataset": "mask@v1", "datacache.io/subpath": "trian"}, "no folder trian; it has train, val"),
    ({"datacache.io/dataset": "mask@v1", "datacache.io/subpath": "train/x"}, "no folder train/x; train has deep"),
    ({"datacache.io/dataset": "mask@v1", "datacache.io/subpath": "README"}, "is a file"),
    ({"datacache.io/dataset": "mask@v1", "datacache.io/warm": "maybe"}, "true, false, wait"),
    ({"datacache.io/bucket": "s3://lab/mine/../others"}, "cannot have '.' or '..' in it"),
    ({"datacache.io/bucket": "lab/out"}, "it is a URL, such as s3://BUCKET/PREFIX"),
    ({}, "datacache.io/dataset: NAME@REF"),
]


def test_what_is_wrong_is_said_with_what_there_is(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    for given, words in WRONG:
        code, text = ask(driver, cluster.put_claim("faces", given))
        assert (code in ("FAILED_PRECONDITION", "PERMISSION_DENIED"), words in text) == (True, True), text
        assert [event["message"] for event in cluster.events.values()] == [text]
        cluster.events.clear()


def test_a_data_set_is_only_for_the_namespaces_it_is_open_to(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    catalog = api.open_catalog(world.settings)
    set_access(catalog, "mask", everybody=False, allow=["team"])
    closed = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v9"})
    code, text = ask(driver, closed)
    assert code == "PERMISSION_DENIED"
    assert "lab" in text
    assert "v1" not in text  # nothing of what is in it
    assert len(cluster.events) == 1
    near = cluster.put_claim("faces", {"datacache.io/dataset": "mosk"})
    assert "mask" not in ask(driver, near)[1]
    opened = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v1"}, namespace="team")
    assert context(driver, opened)["namespace"] == "team"
    # Of a class's data set the same holds; and who does not say where the PVC is gets what is open to all.
    code, _ = ask(driver, cluster.put_claim("faces", {}) | {"dataset": "mask@v1"})
    assert code == "PERMISSION_DENIED"
    code, text = ask(driver, {"dataset": "mask@v1"})
    assert (code, "--extra-create-metadata" in text) == ("PERMISSION_DENIED", True)
    set_access(catalog, "mask", everybody=True)
    catalog.close()


def test_a_bucket_is_for_who_has_credentials_or_was_allowed(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    cluster.put_class("datacache", {})
    allowed = cluster.put_claim("out", {"datacache.io/bucket": "s3://all/lab/runs"})
    assert context(driver, allowed, WRITE) == {"bucket": "s3://all/lab/runs/", "namespace": "lab"}
    other = cluster.put_claim("out", {"datacache.io/bucket": "s3://all/team"})
    code, text = ask(driver, other, WRITE)
    assert code == "PERMISSION_DENIED"
    assert "s3://all/lab/" in text
    assert "node-stage-secret-name" in text
    # The node will mount this one only with credentials from a secret.
    cluster.put_class("datacache", {"csi.storage.k8s.io/node-stage-secret-name": "${pvc.name}"})
    assert context(driver, other, WRITE) == {"bucket": "s3://all/team/", "namespace": "lab", "credentials": "secret"}
    local = cluster.put_claim("out", {"datacache.io/bucket": "file:///etc"})
    assert ask(driver, local, WRITE)[0] == "PERMISSION_DENIED"  # there is nothing that a secret would open
    # What the administrator wrote needs no permission.
    plain = cluster.put_claim("out", {})
    assert context(driver, plain | {"bucket": "s3://admin/${pvc.namespace}/${pvc.name}"}, WRITE)["bucket"] == (
        "s3://admin/lab/out/"
    )


def test_a_provisioner_that_does_not_tell_the_pvc_is_named(world: World) -> None:
    code, text = ask(world.driver, {"warm": "true"})
    assert (code, "--extra-create-metadata" in text) == ("INVALID_ARGUMENT", True)
    assert ask(world.driver, {"dataset": "mask@v1"}) == ("OK", "")  # it needs nothing of the PVC


def test_a_pvc_that_is_gone_is_a_final_answer(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v1"}, uid="another")
    assert ask(driver, claim)[0] == "NOT_FOUND"  # made anew under the name of the one that was meant
    cluster.claims.clear()
    assert ask(driver, claim)[0] == "NOT_FOUND"


def test_an_api_that_is_away_is_tried_again_and_one_that_refuses_is_said(world: World) -> None:
    driver, cluster = world.driver, world.cluster
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v9"})
    away, refused = "UNAVAILABLE", "FAILED_PRECONDITION"
    for status, code in ((500, away), (503, away), (401, refused), (403, refused), ("hang", away)):
        cluster.fail, cluster.failing = status, "persistentvolumeclaims"
        got, text = ask(driver, claim)
        assert (got, "lab/faces" in text) == (code, True), text
    # An Event that cannot be written changes nothing about the answer.
    for fail in (500, 403):
        cluster.fail, cluster.failing = fail, "events"
        assert ask(driver, claim) == ("FAILED_PRECONDITION", "mask has no tag v9; it has v1, v2, v3")
    assert "no Event for lab/faces" in driver.text


def test_no_secret_is_to_be_found_anywhere(
    start_driver: StartDriver, cluster: ApiServer, kubeconfig: Path, masks: dict[str, str], home: Path
) -> None:
    driver = start_driver("--mode=controller", f"--kubeconfig={kubeconfig}")
    secret = "hunter2-hunter2-hunter2"
    secrets = {"access_key_id": secret, "secret_access_key": secret, f"{secret}": secret}
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v1"})
    assert ask(driver, claim, secrets=secrets)[0] == "OK"
    # Even an error that would repeat it, as somebody has written it elsewhere, too, does not.
    answers = [ask(driver, {"dataset": f"mask@{secret}"}, secrets=secrets, name="other")]
    assert "***" in answers[0][1]
    for rpc, fields in {
        "ValidateVolumeCapabilities": {"volume_id": NAME, "volume_capabilities": READ},
        "ControllerExpandVolume": {"volume_id": NAME, "capacity_range": csi.CapacityRange(required_bytes=10)},
        "DeleteVolume": {"volume_id": NAME},
    }.items():
        answers.append(driver.client.code(rpc, **fields, secrets=secrets))
    process = Path("/proc") / str(driver.process.pid)
    where = {
        "answers": repr(answers),
        "arguments": (process / "cmdline").read_text() + (process / "environ").read_text(),
    }
    assert driver.stop() == 0
    where["log"] = driver.text
    for folder, _, names in os.walk(home):
        for name in names:
            where[name] = (Path(folder) / name).read_bytes().decode(errors="replace")
    assert [place for place, text in where.items() if secret in text] == []
    assert TOKEN not in driver.text


def test_an_api_that_cannot_be_reached_is_tried_again(start_driver: StartDriver, tmp_path: Path, home: Path) -> None:
    cluster = ApiServer()
    driver = start_driver("--mode=controller", f"--kubeconfig={cluster.write_kubeconfig(tmp_path / 'config')}")
    claim = cluster.put_claim("faces", {"datacache.io/dataset": "mask@v1"})
    cluster.close()
    assert ask(driver, claim)[0] == "UNAVAILABLE"
