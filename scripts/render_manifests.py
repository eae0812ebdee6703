"""The plain manifests in `deploy/kubernetes`, rendered from the Helm chart without Helm.

    python scripts/render_manifests.py                              # after a change of the chart: write them anew
    python scripts/render_manifests.py --values my.yaml --out DIR   # with values of your own

The chart keeps to what Go's text/template has by itself, plus these, which are put in here: `fail`, `toJson`, `dict` of
values, `lookup` of a Secret (which finds none without a cluster), and the one expression that makes the context of a
node pool.
Values are checked by the chart's schema, as Helm does. It needs `go-template` (a wrapper around text/template), PyYAML
and jsonschema, all in the extra `test`.
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
MONITORING: dict[str, Any] = {"metrics": {"serviceMonitor": True, "rules": True, "dashboard": True}}
UI: dict[str, Any] = {"ui": {"enabled": True, "hosts": ["data.example.org"], "userHeader": "X-Auth-Request-User"}}
DATASETS: dict[str, Any] = {"datasets": {"enabled": True}}
_JSON = """{{- define "json" }}{{ $type := printf "%T" . }}
{{- if eq $type "string" }}{{ printf "%q" . }}{{ else if eq $type "<nil>" }}null
{{- else if eq (printf "%.1s" $type) "m" }}{ {{- $n := 0 }}
{{- range $name, $value := . }}{{ if $n }}, {{ end }}{{ $n = 1 }}
{{- printf "%q" $name }}: {{ template "json" $value }}{{ end }} }
{{- else if eq (printf "%.1s" $type) "[" }}[ {{- range $n, $value := . }}{{ if $n }}, {{ end -}}
{{ template "json" $value }}{{ end }}]{{ else }}{{ . }}{{ end }}{{ end -}}
"""
"""`toJson`, as a template, of what this script does not look up itself. Names come in any order."""
_TO_JSON = re.compile(r"\{\{(-?) *toJson (.+?) *(-?)\}\}")
_OF_VALUE = re.compile(r"toJson \.Values\.([\w.]+)")
_FILE = re.compile(r'\(\.Files\.Get "([\w.-]+)"\)')
_DICT = re.compile(r'\(dict((?: "\w+" \.[\w.]+)+)\)')
_POOL = re.compile(r'\(dict "Release" \$\.Release "Pool" \$pool\.name "Values" \(mergeOverwrite .+?\)\)\)\)')
_LOOKUP = re.compile(r'\(lookup "v1" "Secret" [^()]+\)')
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


def check(values: dict[str, Any]) -> None:
    """Exit with the place and the reason where the chart's schema does not allow values."""
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    wrong = jsonschema.exceptions.best_match(jsonschema.Draft7Validator(schema).iter_errors(values))
    if wrong is not None:
        raise SystemExit(f"{'.'.join(map(str, wrong.absolute_path)) or 'values'}: {wrong.message}")


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
        "Values": copy.deepcopy(values),
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": RELEASE, "Namespace": namespace, "Service": "Helm"},
        "Files": {},
        "Dicts": {"": {}},
        "Json": {},
    }
    data["Values"].setdefault("global", {})  # as Helm does
    _pools(data)
    templates = [path for path in sorted((CHART / "templates").iterdir()) if path.suffix in (".yaml", ".txt")]
    helpers = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = []
        for path in templates:
            text = _JSON + _without_functions(helpers + path.read_text(encoding="utf-8"), data)
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
    extra = render(merge(values, MONITORING))
    files |= {f"monitoring/{name}": extra[name] for name in ("alerts.yaml", "monitoring.yaml")}
    files["ui/ui.yaml"] = render(merge(values, UI))["ui.yaml"]
    with_datasets = render(merge(values, DATASETS))
    files |= {f"datasets/{name}": with_datasets[name] for name in ("datasets.yaml", "controller.yaml")}
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


def _without_functions(text: str, data: dict[str, Any]) -> str:
    """The template with what only Helm has replaced by looks into `data`."""

    def file(found: re.Match[str]) -> str:
        data["Files"][found[1]] = (CHART / found[1]).read_text(encoding="utf-8")
        return f'(index $.Files "{found[1]}")'

    def values(found: re.Match[str]) -> str:
        words = found[1].split()
        pairs = zip(words[::2], words[1::2], strict=True)
        data["Dicts"][found[0]] = {name.strip('"'): _look(data, path.strip(".")) for name, path in pairs}
        return f"(index $.Dicts {json.dumps(found[0])})"

    def of_value(found: re.Match[str]) -> str:
        for each in (data, *(pool["Context"] for pool in data["Values"].get("nodePools") or ())):
            each["Json"][found[1]] = json.dumps(_look(each["Values"], found[1]))
        return f'index $.Json "{found[1]}"'

    text = _OF_VALUE.sub(of_value, text)
    text = _TO_JSON.sub(r'{{\1 template "json" \2 \3}}', text)
    text = _POOL.sub("$pool.Context", _DICT.sub(values, _FILE.sub(file, text)))
    return _LOOKUP.sub('(index $.Dicts "")', _FAIL.sub(r'"\\x00\1\\x00" | print', text))


def _pools(data: dict[str, Any]) -> None:
    """Put into each node pool the context that its DaemonSet is made with: the values with the pool's over them."""
    for pool in data["Values"].get("nodePools") or ():
        over = {
            "node": dict(pool),
            "home": pool.get("home") or data["Values"]["home"],
            "settings": pool.get("settings") or {},
        }
        values = merge({name: value for name, value in data["Values"].items() if name != "nodePools"}, over)
        pool["Context"] = {**data, "Pool": pool["name"], "Values": values, "Json": {}}


def _look(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = (value or {}).get(part)
    return value


def _without_helm(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for each in objects:
        each["metadata"].get("labels", {}).pop("app.kubernetes.io/managed-by", None)
        of_pods = each.get("spec", {}).get("template", {}).get("metadata", {})
        of_pods.get("annotations", {}).pop("datacache.io/secrets", None)  # which are known in a cluster only
        if not of_pods.get("annotations", True):
            del of_pods["annotations"]
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
        check(values)
    for name, text in manifests(values).items():
        path = arguments.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
