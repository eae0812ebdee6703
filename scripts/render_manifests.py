"""The plain manifests in `deploy/kubernetes`, rendered from the Helm chart without Helm.

    python scripts/render_manifests.py                              # after a change of the chart: write them anew
    python scripts/render_manifests.py --values my.yaml --out DIR   # with values of your own

The chart keeps to what Go's text/template has by itself, plus `fail` and `toJson` of one value or one file, which are
put in here.
It needs `go-template` (a wrapper around text/template) and PyYAML, both in the extra `test`.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "datacache"
OUT = ROOT / "deploy" / "kubernetes"
RELEASE = "datacache"
HEADER = "# Rendered from deploy/helm/datacache by scripts/render_manifests.py: change that.\n"
MONITORING: dict[str, Any] = {"metrics": {"serviceMonitor": True, "dashboard": True}}
UI: dict[str, Any] = {"ui": {"enabled": True, "hosts": ["data.example.org"], "userHeader": "X-Auth-Request-User"}}
_TO_JSON = re.compile(r'toJson (?:\.Values\.([\w.]+)|\(\.Files\.Get "([\w.-]+)"\))')
_FAIL = re.compile(r'fail "([^"]+)"')
_FAILED = re.compile(r"\0(.+?)\0")
_RENDER = (
    "import sys, go_template\nfor line in sys.stdin: go_template.render_template(*line.rstrip('\\n').split('\\t'))"
)


def default_values() -> dict[str, Any]:
    """The chart's values.yaml."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return values


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm merges them: maps are merged, all else is replaced."""
    merged = copy.deepcopy(base)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else copy.deepcopy(value)
    return merged


def render(values: dict[str, Any], *, namespace: str = RELEASE) -> dict[str, list[dict[str, Any]]]:
    """The objects of each template, by the template's name. Templates that give none are left out."""
    texts = render_texts(values, namespace=namespace)
    rendered = {
        name: [each for each in yaml.safe_load_all(text) if each]
        for name, text in texts.items()
        if name.endswith(".yaml")
    }
    return {name: objects for name, objects in rendered.items() if objects}


def render_texts(values: dict[str, Any], *, namespace: str = RELEASE) -> dict[str, str]:
    """Return the output of each template, NOTES.txt too, by the template's name."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    data = {
        "Values": values,
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": RELEASE, "Namespace": namespace, "Service": "Helm"},
        "Json": {},
    }
    templates = [path for path in sorted((CHART / "templates").iterdir()) if path.suffix in (".yaml", ".txt")]
    helpers = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = []
        for path in templates:
            text = _put_in_json(helpers + path.read_text(encoding="utf-8"), data)
            text = _FAIL.sub(r'"\\x00\1\\x00" | print', text)
            (folder / f"{path.name}.tpl").write_text(text, encoding="utf-8")
            jobs.append(f"{folder / path.name}.tpl\t{folder / 'data.json'}\t{folder / path.name}\n")
        (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")  # which is YAML
        # In a process of its own: an error in a template ends it.
        done = subprocess.run(
            [sys.executable, "-c", _RENDER], input="".join(jobs), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(next((line for line in done.stderr.splitlines() if line), "the chart cannot be rendered"))
        texts = {path.name: (folder / path.name).read_text(encoding="utf-8") for path in templates}
    if failed := _FAILED.search("".join(texts.values())):
        raise SystemExit(failed[1])
    for name, text in texts.items():
        if "<no value>" in text:
            raise SystemExit(f"{name} uses a value that there is not")
    return texts


def manifests(values: dict[str, Any]) -> dict[str, str]:
    """The files of `deploy/kubernetes`: their texts by their paths in it."""
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": RELEASE, "labels": labels}}
    files = {"00-namespace.yaml": [space], **render(values)}
    extra = render(merge(values, MONITORING))["monitoring.yaml"]
    files["monitoring/monitoring.yaml"] = extra
    files["ui/ui.yaml"] = render(merge(values, UI))["ui.yaml"]
    return {name: HEADER + dump(_without_helm(objects)) for name, objects in files.items()}


def dump(objects: list[dict[str, Any]]) -> str:
    """YAML documents, texts of several lines as blocks."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _put_in_json(text: str, data: dict[str, Any]) -> str:
    """The template with each `toJson …` replaced by a look into `data["Json"]`."""

    def look(found: re.Match[str]) -> str:
        path, file = found.groups()
        if file:
            value: Any = (CHART / file).read_text(encoding="utf-8")
        else:
            value = data["Values"]
            for part in path.split("."):
                value = (value or {}).get(part)
        data["Json"][path or file] = json.dumps(value)
        return f'index $.Json "{path or file}"'

    return _TO_JSON.sub(look, text)


def _without_helm(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for each in objects:
        each["metadata"].get("labels", {}).pop("app.kubernetes.io/managed-by", None)
    return objects


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=Path, help="YAML that goes over the chart's values")
    parser.add_argument("--out", type=Path, default=OUT, help="where to write")
    arguments = parser.parse_args()
    values = default_values()
    if arguments.values:
        values = merge(values, yaml.safe_load(arguments.values.read_text(encoding="utf-8")) or {})
    for name, text in manifests(values).items():
        path = arguments.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
