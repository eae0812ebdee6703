"""The examples for Argo and Kubeflow: the containers' commands run in order on real data, with parameters put in as
Argo does, and their pods are what Kubernetes takes."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import datacache
from tests.cli.conftest import Dsctl
from tests.deploy.test_manifests import VERSION, check_restricted
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "examples"
WORKFLOW = yaml.safe_load((FOLDER / "argo" / "workflow-template.yaml").read_text(encoding="utf-8"))
SPEC = WORKFLOW["spec"]
TEMPLATES: dict[str, dict[str, Any]] = {each["name"]: each for each in SPEC["templates"]}
TASKS: list[dict[str, Any]] = TEMPLATES[SPEC["entrypoint"]]["dag"]["tasks"]
STEPS = ("snapshot", "convert", "select", "shard", "warm", "train", "predict", "evaluate")
IMAGES = 40


def put_in(value: Any, parameters: Mapping[str, str]) -> Any:
    """Replace Argo's tags, in the JSON text as Argo does: simple ones, and the expression that escapes dollars."""

    def found(tag: re.Match[str]) -> str:
        expression = re.fullmatch(r"=sprig\.replace\('\$', '\$\$', ([\w.]+)\)", tag[1])
        # A KeyError: nothing has made it.
        text = parameters[expression[1]].replace("$", "$$") if expression else parameters[tag[1]]
        return json.dumps(text)[1:-1]

    return json.loads(re.sub(r"\{\{([^{}]+)\}\}", found, json.dumps(value)))


def in_pod(word: str, variables: Mapping[str, str]) -> str:
    """Return an argument as a kubelet hands it to the container."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda at: variables[at[1]] if at[1] else "$", word)


def named(parameters: list[dict[str, str]]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in parameters}


def words(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container["args"]]


@promise("The pipeline of the examples runs as its containers' commands say, and again without work")
def test_the_commands_of_the_argo_example_run_in_order_on_blood_cells(
    rclone_s3: RcloneS3,
    blood_cells: Path,
    dsctl: Dsctl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = rclone_s3.make_bucket("pipeline")
    for image in sorted((blood_cells / "JPEGImages").iterdir())[:IMAGES]:
        label = blood_cells / "Annotations" / f"{image.stem}.xml"
        for path in (image, label):
            place = bucket / "bccd" / path.relative_to(blood_cells)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = {"name": "cells", "url": "s3://pipeline/bccd", "bucket": "s3://pipeline/made", "epochs": "1"}
    assert given.keys() == named(SPEC["arguments"]["parameters"]).keys()

    def run(step: str, container: dict[str, Any], volumes: list[dict[str, Any]], place: Path) -> None:
        """Run a container as a pod would: with a folder of its own in place of its `/tmp`, and its volume mounted."""
        data = place / "data"
        for volume in volumes:  # as the driver does for `warm: wait`
            attributes = volume["csi"]["volumeAttributes"]
            assert attributes["warm"] == "wait"
            assert dsctl("warm", attributes["dataset"]).code == 0
            data.mkdir()
            mounted = dsctl("mount", attributes["dataset"], data)
            assert mounted.code == 0, mounted.err
        command = [
            re.sub(r"/tmp/|/data\b", lambda at: str(place) + at[0].removeprefix("/tmp"), in_pod(word, {}))
            for word in words(container)
        ]
        if command[0] == "dsctl":
            done = dsctl(*command[1:])
            assert done.code == 0, f"{step}: {done.err}"
        else:
            command[0] = command[0].replace("python", sys.executable)
            environment = os.environ | {"PYTHONPATH": str(ROOT), "NODE": "node-1"}
            process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert process.returncode == 0, f"{step}: {process.stderr}"
        for volume in volumes:
            assert dsctl("umount", data).code == 0, volume

    def submit(workflow: str, tasks: list[dict[str, Any]] = TASKS) -> dict[str, str]:
        """Run tasks in the order of `depends`, and return what they have given."""
        known = {f"workflow.parameters.{name}": value for name, value in given.items()} | {"workflow.name": workflow}
        outputs: dict[str, str] = {}
        waiting, ended = list(tasks), set[str]()
        while waiting:
            task = next(each for each in waiting if set(each.get("depends", "").split(" && ")) - {""} <= ended)
            waiting.remove(task)
            step = task["name"]
            inputs = named(put_in(task["arguments"]["parameters"], known | outputs))
            template = TEMPLATES[task["template"]]
            assert inputs.keys() == {each["name"] for each in template["inputs"]["parameters"]}
            template = put_in(template, {f"inputs.parameters.{name}": value for name, value in inputs.items()})
            place = tmp_path / workflow / step
            place.mkdir(parents=True)
            run(step, template["container"], template.get("volumes", []), place)
            for output in template["outputs"]["parameters"]:
                text = (place / output["valueFrom"]["path"].removeprefix("/tmp/")).read_text()
                outputs[f"tasks.{step}.outputs.parameters.{output['name']}"] = text
            ended.add(step)
        return outputs

    first = submit("loop-1")
    results = {
        each["name"]: put_in(each["valueFrom"]["parameter"], first)
        for each in TEMPLATES[SPEC["entrypoint"]]["outputs"]["parameters"]
    }
    assert re.fullmatch(r"cells@[0-9a-f]{32}", results["snapshot"])
    assert results["model"] == "s3://pipeline/made/models/loop-1.pt"
    assert (bucket / "made" / "models" / "loop-1.pt").is_file()
    report = json.loads(results["report"])
    assert (report["kind"], report["objects"] > 100) == ("objects", True)
    assert 0 < report["images"] < IMAGES / 2
    assert first["tasks.warm.outputs.parameters.node"] == "node-1"
    (shards,) = (bucket / "made" / "shards").iterdir()
    before = {path: path.stat().st_mtime_ns for path in shards.iterdir()}

    again = submit("loop-2", TASKS[: STEPS.index("warm")])
    assert again == {name: first[name] for name in again}, "the same data are the same snapshots"
    assert {path: path.stat().st_mtime_ns for path in shards.iterdir()} == before


def test_argos_tasks_name_templates_parameters_and_outputs_that_there_are() -> None:
    assert (WORKFLOW["apiVersion"], WORKFLOW["kind"]) == ("argoproj.io/v1alpha1", "WorkflowTemplate")
    assert tuple(each["name"] for each in TASKS) == STEPS
    before: set[str] = set()
    for task in TASKS:
        template = TEMPLATES[task["template"]]
        assert [each["name"] for each in task["arguments"]["parameters"]] == [
            each["name"] for each in template["inputs"]["parameters"]
        ]
        used = set(re.findall(r"\btasks\.(\w+)\.outputs\.parameters\.\w+", json.dumps(task)))
        assert used <= before, "a task uses what comes before it"
        assert set(filter(None, task.get("depends", "").split(" && "))) <= before
        before.add(task["name"])
        inputs = {each["name"] for each in template["inputs"]["parameters"]}
        assert set(re.findall(r"\{\{inputs\.parameters\.(\w+)\}\}", json.dumps(template))) == inputs
        [output] = template["outputs"]["parameters"]
        container = template["container"]
        assert any(output["valueFrom"]["path"] in word for word in words(container))


def test_pods_of_the_argo_example_are_restricted_and_kubernetes_takes_them() -> None:
    for name, template in TEMPLATES.items():
        if name == SPEC["entrypoint"]:
            continue
        volumes = [*SPEC["volumes"], *template.get("volumes", [])]
        spec = {"securityContext": SPEC["securityContext"], "volumes": volumes, "restartPolicy": "Never"}
        spec |= {"containers": [{"name": "main"} | template["container"]]}
        spec |= {"affinity": template["affinity"]} if "affinity" in template else {}
        metadata = {"name": name, "labels": SPEC["podMetadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        check_restricted(spec)
        [container] = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert re.fullmatch(rf"datacache(-training)?:{re.escape(datacache.__version__)}", container["image"])
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in volumes}
        if "data" in mounts:
            assert mounts["data"]["mountPropagation"] == "HostToContainer"


def test_what_is_submitted_to_argo_names_no_variable_of_a_pod() -> None:
    evil = "-$(AWS_SECRET_ACCESS_KEY)$$"
    known = {f"workflow.parameters.{name}": evil for name in named(SPEC["arguments"]["parameters"])}
    known |= {"workflow.name": "loop-1"}
    seen = 0
    for task in TASKS:
        inputs = named(put_in(task["arguments"]["parameters"], known))
        template = TEMPLATES[task["template"]]
        container = put_in(template["container"], {f"inputs.parameters.{name}": text for name, text in inputs.items()})
        seen += sum(evil in in_pod(word, {}) for word in words(container))  # a KeyError: a variable's value
        for each in template["outputs"]["parameters"]:  # the reference of a snapshot, or what was submitted
            known[f"tasks.{task['name']}.outputs.parameters.{each['name']}"] = evil if each["name"] == "url" else "a@b"
    assert seen > len(TASKS)


def component(step: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "kubeflow" / f"{step}.yaml").read_text(encoding="utf-8"))
    return found


def test_components_of_kubeflow_have_the_commands_of_the_argo_example() -> None:
    assert {path.stem for path in (FOLDER / "kubeflow").glob("*.yaml")} == set(STEPS)
    for step in STEPS:
        described = component(step)
        container, template = described["implementation"]["container"], TEMPLATES[step]
        assert container["image"] == template["container"]["image"]
        if step == "warm":  # a component does not learn on which node it is
            continue
        paths = {each["name"]: each["valueFrom"]["path"] for each in template["outputs"]["parameters"]}

        def as_in_argo(word: Any, paths: dict[str, str] = paths) -> Any:
            if isinstance(word, str):
                return word
            [(kind, name)] = word.items()
            return {"inputValue": f"{{{{inputs.parameters.{name}}}}}", "outputPath": paths.get(name)}[kind]

        assert [as_in_argo(word) for word in words(container)] == words(template["container"])
        used = [word["inputValue"] for word in container["args"] if "inputValue" in word and isinstance(word, dict)]
        assert {each["name"] for each in described["inputs"]} == set(used)
        assert [each["name"] for each in described["outputs"]] == list(paths)


def test_the_pipeline_of_kubeflow_names_each_component_and_gives_it_its_inputs() -> None:
    tree = ast.parse((FOLDER / "kubeflow" / "pipeline.py").read_text(encoding="utf-8"))
    calls = {
        node.func.slice.value: {word.arg for word in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.slice, ast.Constant)
    }
    assert calls == {step: {each["name"] for each in component(step).get("inputs", [])} for step in STEPS}
