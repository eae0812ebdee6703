"""`dsctl k8s pvc`: what it prints is what Kubernetes' own schemas accept."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from datacache.api import open_catalog, preferred_nodes
from datacache.catalog.holdings import snapshot_label
from datacache.catalog.refs import volume_snapshot
from tests.cli.conftest import Dsctl
from tests.promises import promise

VERSION = "1.37"


def printed(text: str) -> list[dict[str, Any]]:
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        kubernetes_validate.validate(each, VERSION, strict=True)
    return objects


@pytest.fixture
def snapshot(dsctl: Dsctl, bucket: Path) -> str:
    made = dsctl("snapshot", "create", "faces/mask", "--from", bucket.as_uri(), "--tag", "V1.0", "--json")
    assert made.code == 0, made.err
    id: str = made.json["id"]
    return id


def test_a_pvc_of_a_snapshot_names_it_and_asks_for_its_size(dsctl: Dsctl, snapshot: str) -> None:
    done = dsctl("k8s", "pvc", "faces/mask@V1.0")
    assert done.code == 0, done.err
    [claim] = printed(done.out)
    assert claim["metadata"] == {
        "name": "faces-mask-v1-0",
        "annotations": {"datacache.io/dataset": "faces/mask@V1.0"},
    }
    assert claim["spec"] == {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "datacache-dataset",
        "resources": {"requests": {"storage": "1Mi"}},
    }


def test_every_option_is_in_what_is_printed_and_a_pod_comes_along(dsctl: Dsctl, snapshot: str) -> None:
    options = ("--name", "data", "--namespace", "vision", "--storage-class", "fast", "--warm", "wait", "--pin")
    done = dsctl("k8s", "pvc", "faces/mask@latest", *options, "--subpath", "images/", "--by-id", "--with-pod", "--json")
    assert done.code == 0, done.err
    claim, pod = done.json["items"]
    printed(yaml.safe_dump_all([claim, pod]))
    assert claim["metadata"]["namespace"] == pod["metadata"]["namespace"] == "vision"
    assert claim["metadata"]["annotations"] == {
        "datacache.io/dataset": f"faces/mask@{snapshot}",
        "datacache.io/warm": "wait",
        "datacache.io/pin": "true",
        "datacache.io/subpath": "images",
    }
    assert claim["spec"]["storageClassName"] == "fast"
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "data"


def test_a_snapshot_is_named_by_its_id_under_the_options_former_name_too(dsctl: Dsctl, snapshot: str) -> None:
    printed_now, printed_before = (
        dsctl("k8s", "pvc", "faces/mask@latest", option) for option in ("--by-id", "--pinned-id")
    )
    assert f"faces/mask@{snapshot}" in printed_now.out
    assert printed_before.out == printed_now.out
    assert "--pinned-id" not in dsctl("k8s", "pvc", "--help").out


def test_a_pvc_of_a_bucket_can_be_written_to_and_has_a_quota(dsctl: Dsctl) -> None:
    done = dsctl("k8s", "pvc", "s3://runs/exp-7/", "--size", "2Ti", "--with-pod")
    assert done.code == 0, done.err
    claim, _ = printed(done.out)
    assert claim["metadata"]["name"] == "runs-exp-7"
    assert claim["metadata"]["annotations"] == {"datacache.io/bucket": "s3://runs/exp-7"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["storageClassName"] == "datacache-bucket"
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"


@promise("A pod never waits for a warm node")
def test_a_pod_prefers_nodes_that_hold_the_snapshot_and_requires_none(dsctl: Dsctl, snapshot: str) -> None:
    _, pod = printed(dsctl("k8s", "pvc", "faces/mask", "--with-pod").out)
    [(kind, affinity)] = pod["spec"]["affinity"].items()
    assert (kind, list(affinity)) == ("nodeAffinity", ["preferredDuringSchedulingIgnoredDuringExecution"])
    [terms] = affinity.values()
    expressions = [(term["weight"], *term["preference"]["matchExpressions"]) for term in terms]
    label = {"key": snapshot_label(snapshot), "operator": "In"}
    assert expressions == [(100, label | {"values": ["full"]}), (50, label | {"values": ["part"]})]
    assert "topology" not in str(pod)
    assert "nodeSelector" not in pod["spec"]
    _, pod = printed(dsctl("k8s", "pvc", "s3://runs/exp-7", "--with-pod").out)
    assert "affinity" not in pod["spec"], "a bucket has no warm nodes"


def test_of_several_snapshots_the_larger_ones_count_more() -> None:
    weights = [term["weight"] for term in preferred_nodes({"a" * 32: 10**12, "b" * 32: 10**11, "c" * 32: 1})]
    assert weights == [100, 50, 10, 5, 2, 1]
    assert [term["weight"] for term in preferred_nodes({"a" * 32: 0})] == [100, 50]
    assert preferred_nodes({}) == []


def test_claims_of_several_folders_have_names_of_their_own(dsctl: Dsctl) -> None:
    names = set()
    for subpath in ("", "images", "labels/train"):
        [claim] = printed(dsctl("k8s", "pvc", "s3://runs/exp-7", "--subpath", subpath).out)
        assert claim["spec"]["resources"]["requests"]["storage"] == "100Gi"
        names.add(claim["metadata"]["name"])
    assert names == {"runs-exp-7", "runs-exp-7-images", "runs-exp-7-labels-train"}


def test_what_a_static_volume_was_can_be_forgotten(dsctl: Dsctl, snapshot: str) -> None:
    with closing(open_catalog()) as catalog:
        for version in ("the first", "another"):
            assert volume_snapshot(catalog, "handle", "faces/mask@V1.0", lambda said=version: said) == "the first"
        assert dsctl("k8s", "forget", "handle", "--json").json == {"handle": "handle", "known": True}
        assert dsctl("k8s", "forget", "handle", "--json").json == {"handle": "handle", "known": False}
        assert volume_snapshot(catalog, "handle", "faces/mask@V1.0", lambda: "another") == "another"


def test_a_data_set_is_given_to_a_resource_and_taken_from_it(dsctl: Dsctl) -> None:
    assert dsctl("k8s", "assign", "mask", "--json").json == {"name": "mask", "resource": None}
    given = dsctl("k8s", "assign", "mask", "team-a/faces")
    assert given.out == "mask is made by the DataSet team-a/faces\n"
    assert given.err == "warning: there is no dataset 'mask' yet: team-a/faces makes the first version\n"
    assert dsctl("k8s", "assign", "mask", "--json").json == {"name": "mask", "resource": "team-a/faces"}
    done = dsctl("k8s", "assign", "mask", "faces", "--json")
    assert (done.code, done.error["type"]) == (2, "UsageError")
    assert dsctl("k8s", "assign", "mask", "team-b/faces", "--none").code == 2
    assert dsctl("k8s", "assign", "mask", "--none").out == "mask is made by no DataSet\n"


def test_a_snapshot_that_is_not_there_is_the_usual_error(dsctl: Dsctl, snapshot: str) -> None:
    done = dsctl("k8s", "pvc", "faces/mask@v9", "--json")
    assert done.code == 1
    assert done.error["type"] == "SnapshotNotFoundError"
    assert done.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("s3://runs/exp-7", "--warm", "true"),
        ("s3://runs/exp-7", "--size", "much"),
        ("s3://runs/exp-7", "--size", "1ki"),
        ("mask@v1", "--subpath", "../other"),
        ("mask@v1", "--size", "500Gi"),
        ("mask@v1", "--name", "Not_A_Name"),
        ("mask@v1", "--namespace", "-"),
        ("s3://key:secret@runs/exp-7",),
    ],
)
def test_what_kubernetes_would_refuse_is_wrong_usage(dsctl: Dsctl, arguments: tuple[str, ...]) -> None:
    done = dsctl("k8s", "pvc", *arguments)
    assert done.code == 2, done.out + done.err
    assert "secret" not in done.out + done.err
