"""The resource DataSet in the chart: its schema, and what the controller may do for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from csi_driver.__main__ import _parser
from csi_driver.datasets.resource import GROUP, PLURAL, VERSION, wanted_of
from tests.csi_driver.dataset_api import SPACE, TEMPLATE, dataset_objects, dataset_schema
from tests.deploy.test_manifests import ROOT, check_restricted, kind, rendered
from tests.promises import promise

EXAMPLE = ROOT / "deploy" / "examples" / "dataset.yaml"


def crd() -> dict[str, Any]:
    [found] = [each for each in dataset_objects() if each["kind"] == "CustomResourceDefinition"]
    return found


def schemas(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield place, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas(each, f"{place}.{name}")
    if "items" in schema:
        yield from schemas(schema["items"], f"{place}[]")


def test_the_schema_is_structural_and_bounded() -> None:
    """As https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions asks: a type
    everywhere, and nothing but value validations in `not`; and sizes by which the API server bounds its CEL rules."""
    jsonschema.Draft202012Validator.check_schema(dataset_schema())
    for place, schema in schemas(dataset_schema()):
        assert "type" in schema, place
        assert set(schema.get("not", {})) <= {"enum"}, place
        if place.startswith(".spec"):
            assert schema["type"] != "array" or "maxItems" in schema, place
            assert schema["type"] != "string" or "maxLength" in schema, place
        if "pattern" in schema:  # Go's: no look-around, no back reference
            assert not re.search(r"\(\?|\\[1-9]", schema["pattern"]), place
        assert "additionalProperties" not in schema or "properties" not in schema, place


def test_the_resource_is_named_as_the_controller_asks_for_it() -> None:
    spec = crd()["spec"]
    [version] = spec["versions"]
    assert crd()["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert (spec["group"], version["name"], spec["names"]["plural"]) == (GROUP, VERSION, PLURAL)
    assert version["subresources"] == {"status": {}}
    properties = dataset_schema()["properties"]
    columns = [re.findall(r"\.(\w+)", each["jsonPath"]) for each in version["additionalPrinterColumns"]]
    for first, second, *rest in columns:
        if first != "metadata":
            place = properties[first]["properties"][second]
            assert not rest or rest[0] in place.get("properties", {}) or place["type"] == "array"
    assert crd()["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_example_and_the_one_in_the_document_are_valid_and_understood() -> None:
    text = (ROOT / "docs" / "KUBERNETES.md").read_text(encoding="utf-8")
    documents = [EXAMPLE.read_text(encoding="utf-8"), *re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    found = [each for text in documents for each in yaml.safe_load_all(text) if each and each.get("kind") == "DataSet"]
    assert len(found) >= 2
    for each in found:
        jsonschema.validate(each, dataset_schema())
        each["metadata"].setdefault("namespace", "team-a")
        wanted_of(each)
        assert not set(each["spec"]) - set(dataset_schema()["properties"]["spec"]["properties"])


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"source": "file:///etc"},
        {"source": "s3://"},
        {"source": "s3://lab/a\nb"},
        {"source": "s3://lab/", "name": "-a"},
        {"source": "s3://lab/", "name": "a//b"},
        {"source": "s3://lab/", "tags": ["v1"] * 17},
        {"source": "s3://lab/", "schedule": "$(date)"},
        {"source": "s3://lab/", "access": {"allow": ["*"]}},
    ],
    ids=str,
)
def test_the_schema_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"spec": wrong}, dataset_schema())


@promise("Jobs of DataSets run beside datacache, where no tenant has rights, and ask nothing of the API")
def test_jobs_run_where_no_tenant_has_rights_and_the_controller_may_make_them_there_only() -> None:
    objects = {
        (each["kind"], each["metadata"]["name"]): each
        for each in dataset_objects()
        if "rules" in each or "template" in each
    }
    assert {each["metadata"].get("namespace", "") for (kind, _), each in objects.items() if kind != "ClusterRole"} == {
        SPACE
    }
    assert objects["ClusterRole", "datacache-datasets"]["rules"] == [
        {"apiGroups": ["datacache.io"], "resources": ["datasets"], "verbs": ["list", "watch"]},
        {"apiGroups": ["datacache.io"], "resources": ["datasets/status"], "verbs": ["patch"]},
    ]
    allowed = {rule["resources"][0]: rule["verbs"] for rule in objects["Role", "datacache-datasets"]["rules"]}
    assert allowed == {
        "podtemplates": ["get"],
        "jobs": ["list", "create", "delete"],
        "cronjobs": ["list", "create", "patch", "delete"],
        "pods": ["list"],
    }
    template = objects["PodTemplate", TEMPLATE]["template"]
    check_restricted(template["spec"])
    assert template["spec"]["automountServiceAccountToken"] is False
    [container] = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "datacache", "whom MongoDB's policy lets in"


def test_the_controller_serves_data_sets_only_where_that_is_switched_on() -> None:
    assert not [each for each in rendered("the defaults") if "datasets" in each["metadata"]["name"]]
    for values, wanted in (("the defaults", None), ("data sets", "lab/datacache-datasets")):
        [deployment] = kind(values, "Deployment")
        parsed = _parser().parse_args(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
        assert parsed.datasets == wanted
    assert parsed.dataset_source == ["s3://faces/", "s3://lab/${pvc.namespace}/"]
    names = [path.name for path in (Path(ROOT) / "deploy" / "kubernetes" / "datasets").iterdir()]
    assert sorted(names) == ["controller.yaml", "datasets.yaml"]
