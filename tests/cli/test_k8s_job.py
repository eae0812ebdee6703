"""`dsctl k8s job`: Kubernetes takes what is printed, the command's parser has checked it, and its containers do the
work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from dataset_cli.commands.convert import convert
from dataset_cli.commands.k8s_job import job
from dataset_cli.demo.faces import draw_faces
from dataset_cli.main import COMMANDS
from tests.cli.conftest import ROOT, Dsctl
from tests.conftest import new_home
from tests.deploy.test_manifests import VERSION, check_restricted, pod_specs
from tests.promises import promise

YOLO = ("k8s", "job", "convert", "masks", "--to", "yolo", "--as", "masks-yolo", "--workers", "50")


def printed(text: str) -> list[dict[str, Any]]:
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        kubernetes_validate.validate(each, VERSION, strict=True)
    for _, spec in pod_specs(objects):
        check_restricted(spec)
        assert spec["automountServiceAccountToken"] is False
        assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    return objects


def arguments(job: dict[str, Any]) -> list[str]:
    """What a container gets from Kubernetes, which takes `$$` for `$`."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["dsctl"]
    return [word.replace("$$", "$") for word in container["args"]]


@pytest.fixture
def id(dsctl: Dsctl, bucket: Path) -> str:
    made = dsctl("snapshot", "create", "masks", "--from", bucket.as_uri(), "--json")
    assert made.code == 0, made.err
    found: str = made.json["id"]
    return found


def test_a_client_and_an_indexed_job_of_workers_are_printed(dsctl: Dsctl, id: str) -> None:
    done = dsctl(*YOLO, "--run", "night", "--namespace", "vision", "--cpu", "4", "--memory", "8Gi", "--ttl", "2h")
    assert done.code == 0, done.err
    client, workers = printed(done.out)
    assert [each["metadata"]["name"] for each in (client, workers)] == ["night-client", "night-workers"]
    assert {each["metadata"]["namespace"] for each in (client, workers)} == {"vision"}
    ref = f"masks@{id}"
    wanted = ["convert", ref, "--to=yolo", "--as=masks-yolo", "--on=queue://night", "--output-ref=/dev/termination-log"]
    assert arguments(client) == wanted
    assert arguments(workers) == ["tasks", "work", "--job=night", "--processes=4", "--max-idle=30m"]
    spec = workers["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 50, 50)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec["ttlSecondsAfterFinished"]) == (4, 25, 7200)
    for each, action in ((client, "FailJob"), (workers, "FailIndex")):
        lost, wrong = each["spec"]["podFailurePolicy"]["rules"]
        assert lost == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert wrong == {"action": action, "onExitCodes": {"operator": "In", "values": [2]}}
        resources = each["spec"]["template"]["spec"]["containers"][0]["resources"]
        assert resources == {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert (labels["app.kubernetes.io/name"], labels["datacache.io/run"]) == ("datacache", "night")


def test_every_option_reaches_the_pod_as_the_commands_parser_reads_it(dsctl: Dsctl, id: str, tmp_path: Path) -> None:
    classes = tmp_path / "classes.txt"
    classes.write_text("mask\nno_mask\n")
    options = ["--classes", str(classes), "--split=train=0.8,val=0.2", "--map", "a=b", "--map", "c=d", "--decode"]
    options += ["--resize", "640x480", "--letterbox", "--message", "-$(AWS_SECRET_ACCESS_KEY) $x", "--quality", "90"]
    done = dsctl(*YOLO, *options, "--json")
    assert done.code == 0, done.err
    files, client, _ = printed(yaml.safe_dump_all(done.json["items"]))
    [word] = [word for word in arguments(client) if word.startswith("--classes=")]
    [mount] = [
        each["mountPath"]
        for each in client["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        if each["name"] == "files"
    ]
    assert word == f"--classes={mount}/classes"
    assert files["data"] == {"classes": "mask\nno_mask\n"}
    raw = client["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--message=-$$(AWS_SECRET_ACCESS_KEY) $$x" in raw, "Kubernetes would put in what the Secret says"

    def parsed(words: list[str]) -> dict[str, Any]:
        with click.Context(convert, resilient_parsing=True).scope():
            return convert.make_context("convert", list(words), resilient_parsing=True).params

    given = parsed(["masks", "--to", "yolo", "--as", "masks-yolo", *options])
    there = parsed(arguments(client)[1:])
    differ = {name for name in given if given[name] != there[name]}
    assert differ == {"ref", "classes", "on"}


@promise("Jobs of `dsctl k8s job` have checked arguments, and names that another run does not have")
def test_what_pods_cannot_reach_is_told(dsctl: Dsctl, id: str, bucket: Path) -> None:
    done = dsctl(*YOLO)
    assert done.code == 0, done.err
    catalog, folder = done.err.splitlines()
    assert "catalog" in catalog
    assert "it needs masks" in catalog
    assert f"masks lies in {bucket.as_uri()}/" in folder


def test_each_run_has_names_of_its_own_and_one_that_is_named_can_be_made_larger(dsctl: Dsctl, id: str) -> None:
    one, other = (printed(dsctl(*YOLO).out) for _ in range(2))
    names = [each["metadata"]["name"] for each in (*one, *other)]
    assert len(set(names)) == 4
    assert all(name.startswith("masks-yolo-") for name in names)
    few, many = (printed(dsctl(*YOLO, "--run", "night", "--workers", workers).out) for workers in ("50", "80"))
    assert few[0] == many[0]
    changeable = {"completions", "parallelism", "maxFailedIndexes"}  # while a Job runs
    before, after = few[1]["spec"], many[1]["spec"]
    assert {key for key in before if before[key] != after[key]} == changeable


def test_a_long_name_of_a_data_set_leaves_room_for_what_kubernetes_adds(dsctl: Dsctl, id: str) -> None:
    done = dsctl(*YOLO[:6], "--as", f"a/{'Very.Long-' * 8}name", "--workers", "10000")
    assert done.code == 0, done.err
    for each in printed(done.out):
        assert len(f"{each['metadata']['name']}-9999") <= 63  # the host name of a pod
    assert dsctl(*YOLO, "--run", "a" * 41).code == 2


def test_credentials_are_of_the_charts_secrets_or_of_those_that_are_named(dsctl: Dsctl, id: str) -> None:
    def sources(*options: str) -> tuple[dict[str, Any], list[Any]]:
        client, workers = printed(dsctl(*YOLO, *options).out)
        one, other = (each["spec"]["template"]["spec"]["containers"][0] for each in (client, workers))
        assert (one["env"], one["envFrom"]) == (other["env"], other["envFrom"])
        return {each["name"]: each for each in one["env"]}, one["envFrom"]

    variables, secrets = sources()
    nightly = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "nightly-snapshot.yaml"
    [(_, spec)] = pod_specs(list(yaml.safe_load_all(nightly.read_text(encoding="utf-8"))))
    same = {each["name"]: each for each in spec["containers"][0]["env"] if each["name"] != "DATACACHE_HOME"}
    assert same.items() <= variables.items()
    assert [each["secretRef"]["name"] for each in secrets] == ["datacache-stores"]
    variables, secrets = sources("--secret", "catalog", "--secret", "stores.lab")
    assert "DATACACHE_CATALOG" not in variables
    assert secrets == [{"secretRef": {"name": "catalog"}}, {"secretRef": {"name": "stores.lab"}}]


@promise("Jobs of `dsctl k8s job` have checked arguments, and names that another run does not have")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--to", "yola"), "--to"),
        (("--split", "train=x"), "--split"),
        (("--letterbox",), "--letterbox"),
        (("--resize", "0x1"), "--resize"),
        (("--map", "x"), "--map"),
        (("--classes", "/nowhere/classes.txt"), "classes"),
        (("--report", "report.json"), "--report"),
        (("--output-ref", "ref"), "--output-ref"),
        (("--on", "dask://a:1"), "--on"),
        (("--cpu", "0.5"), "--cpu"),
        (("--memory", "much"), "--memory"),
        (("--secret", "A_b"), "--secret"),
        (("--workers", "0"), "--workers"),
        (("--run", "Night"), "--run"),
        (("--tag", "a\nb"), "tag"),
        (("--ttl", "99999d"), "--ttl"),
        (("--deadline", "0"), "--deadline"),
    ],
)
def test_what_would_fail_in_the_pod_is_refused_before_anything_is_printed(
    dsctl: Dsctl, id: str, options: tuple[str, ...], word: str
) -> None:
    done = dsctl(*YOLO, *options)
    assert done.code == 2, done.out + done.err
    assert word in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("shard", "masks"), "--to"),
        (("shard", "masks", "--to", "shards/masks"), "is a folder"),
        (
            ("convert", "masks", "--to", "yolo", "--as", "a", "--resize", "8x8", "--objects", "file:///tmp/o"),
            "is a folder",
        ),
        (("stats", "masks", "--fix"), "--as"),
        (("query", "masks", "--tag", "v1"), "--as"),
        (("query", "masks", "--where", "wdth > 1", "--as", "wide"), "did you mean 'width'"),
        (("query", "masks", "--where", 'count("mask") > "a"', "--as", "wide"), "condition"),
        (("merge", "masks", "--as", "both"), "fewer than two"),
    ],
)
def test_a_command_looks_at_its_arguments_before_anything_is_printed(
    dsctl: Dsctl, id: str, words: tuple[str, ...], said: str
) -> None:
    done = dsctl("k8s", "job", *words, "--workers", "2")
    assert done.code == 2, done.out + done.err
    assert said in done.err
    assert done.out == ""


PREDICT = ("k8s", "job", "predict", "masks", "--as", "found", "--workers", "3", "--run", "night")


def test_only_workers_of_predictions_load_models_and_their_weights_are_those_of_now(dsctl: Dsctl, id: str) -> None:
    how = ("--model", "detect:load", "--image", "mine:1", "--device", "cuda", "--split", "train")
    done = dsctl(*PREDICT, *how, "--weights", "weights@v1/best.pt")
    assert (done.code, done.out) == (1, ""), "no such snapshot"
    done = dsctl(*PREDICT, *how, "--weights", "masks@latest/train/best.pt")
    assert done.code == 0, done.err
    client, workers = printed(done.out)
    assert arguments(workers) == ["tasks", "work", "--job=night", "--processes=1", "--max-idle=30m", "--allow-models"]
    said = arguments(client)
    assert said[:2] == ["predict", f"masks@{id}"]
    assert {f"--weights=masks@{id}/train/best.pt", "--model=detect:load", "--device=cuda", "--split=train"} < set(said)
    for each in (client, workers):
        assert each["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    done = dsctl(*PREDICT, *how, "--weights", "s3://models/best.pt")
    assert "--weights=s3://models/best.pt" in arguments(printed(done.out)[0])


@promise("Jobs of `dsctl k8s job` have checked arguments, and names that another run does not have")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--model", "m:f"), "--image"),
        (("--image", "mine:1"), "--model"),
        (("--image", "mine:1", "--model", "best.onnx"), "--model: best.onnx is a path from where you are"),
        (("--image", "mine:1", "--model", "m:f", "--weights", "./a@b/c"), "--weights: ./a@b/c is a path from"),
        (("--image", "mine:1", "--model", "m:f", "--weights", "masks@v1"), "names no file of a snapshot"),
        (("--image", "mine:1", "--model", "m:f", "--device", "cuda:0", "--device", "cuda:1"), "several devices"),
        (("--image", "mine:1", "--model", "m:f", "--decoders", "1"), "--decoders"),
        (("--image", "mine:1", "--accept", "0.5"), "--accept"),
        (("--image", "mine:1", "--model", "m:f", "--classes", "/nowhere/classes.txt"), "classes"),
    ],
)
def test_a_prediction_that_would_fail_in_the_pod_is_refused_before_anything_is_printed(
    dsctl: Dsctl, id: str, options: tuple[str, ...], word: str
) -> None:
    done = dsctl(*PREDICT, *options)
    assert done.code == 2, done.out + done.err
    assert word in done.err
    assert done.out == ""


def test_a_snapshot_that_is_not_there_gets_no_job(dsctl: Dsctl, id: str) -> None:
    done = dsctl("k8s", "job", "convert", "masks@v9", *YOLO[4:])
    assert (done.code, done.out) == (1, "")


def test_options_of_pods_are_no_commands_own_and_every_command_has_an_engine() -> None:
    context = click.Context(job)
    names = job.list_commands(context)
    assert set(names) == {
        name
        for name, module in COMMANDS.items()
        if any(each.name == "on" for each in getattr(import_module(module), name).params)
    }
    for name in names:
        found = job.get_command(context, name)
        assert found is not None
        options = [option for parameter in found.params for option in parameter.opts]
        assert len(options) == len(set(options)), name
        fields = [parameter.name for parameter in found.params]
        assert len(fields) == len(set(fields)), name
        assert not {"--on", "--processes", "--output-ref", "--report"} & set(options)


@promise("Jobs of `dsctl k8s job` do the work of the command, and all their pods end well")
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("convert", "faces", "--to", "yolo", "--split", "train=0.8,val=0.2", "--resize", "64x64"), ()),
        (("predict", "faces", "--model", "tests.models.finder:Finder", "--batch", "2"), ("--image", "mine:1")),
    ],
)
def test_the_containers_of_both_jobs_make_the_snapshot_that_the_command_makes(
    words: tuple[str, ...],
    options: tuple[str, ...],
    dsctl: Dsctl,
    home: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    draw_faces(tmp_path / "faces", count=12)
    assert dsctl("snapshot", "create", "faces", "--from", (tmp_path / "faces").as_uri()).code == 0
    local = dsctl(*words, "--as", "here", "--json")
    assert local.code == 0, local.err
    done = dsctl("k8s", "job", *words, *options, "--as", "there", "--workers", "2", "--run", "night")
    assert done.code == 0, done.err
    client, workers = printed(done.out)
    place = tmp_path / "message"
    pods = [[word.replace("/dev/termination-log", str(place)) for word in arguments(client)]]
    pods += [arguments(workers)] * workers["spec"]["parallelism"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DATACACHE_CATALOG": f"sqlite:///{home}/catalog.db"}
    with ThreadPoolExecutor(len(pods)) as pool, new_home(tmp_path_factory) as elsewhere:
        homes = [{}, elsewhere, {}]  # of a worker on another node, with the same catalog

        def run(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "dataset_cli", *words]
            return subprocess.run(
                line, env=environment | variables, capture_output=True, text=True, timeout=90, check=False
            )

        ended = list(pool.map(run, pods, homes))
    assert [each.returncode for each in ended] == [0, 0, 0], [each.stderr for each in ended]
    assert sum(int(re.search(r"the job is done: ([\d,]+) tasks?", each.stdout)[1]) for each in ended[1:]) > 0
    assert place.read_text() == f"there@{local.json['snapshot']['id']}"
