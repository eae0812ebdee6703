"""Test what the documents name exists: tests that hold promises, files, settings, benchmarks, links."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from datacache.settings import Settings
from tests.promises import marked, promise, promised

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("datacache", "fuse_mount", "csi_driver", "dataset_cli")
DOCS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(f for p in PACKAGES for f in (ROOT / p).rglob("*.md"))]
)
_PLACES = [ROOT / top for top in (*PACKAGES, "tests", "benchmarks", "scripts")]
"""Paths in the documents are the last parts of files below these, or start at the root or beside the document."""


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    promises, tests = promised(), marked()
    assert len(promises) > 350
    assert {"without a test": promises.keys() - tests.keys(), "no promise": tests.keys() - promises.keys()} == {
        "without a test": set(),
        "no promise": set(),
    }


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    names = {name for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|sh))(?:::\w+)?`", text) if "*" not in name}
    files = [f"/{path.relative_to(ROOT)}" for place in _PLACES for path in place.rglob("*.py")]
    places = [document.parent, ROOT]
    missing = [
        name
        for name in sorted(names)
        if not any((place / name).is_file() for place in places) and not any(f.endswith(f"/{name}") for f in files)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@promise("Every install line names our distribution and an extra that it has")
def test_what_is_to_be_installed_is_our_distribution_with_an_extra_it_has() -> None:
    """`datacache` is somebody else's name on the package index: who installs it gets another program."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {*project["optional-dependencies"]}
    wrong = []
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"):
        if not path.endswith((".py", ".md", ".toml", ".sh", ".yaml", "Dockerfile")) or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        for name, of in re.findall(r"\b(datacache|dsctl)\[([a-z0-9,]+)\](?=['\"`,.\s)])", text):
            if name != project["name"] or not {*of.split(",")} <= extras:
                wrong.append((path, f"{name}[{of}]"))
        wrong += [(path, line) for line in re.findall(r"pip install '?datacache\b.*", text)]
    assert wrong == []
    assert project["name"] == "dsctl"


def test_the_tree_of_the_architecture_has_every_folder_and_names_only_what_there_is() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.partition("## The tree")[2].split("```")[1]
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    folders = {file.parent.name for file in files}
    assert set(re.findall(r"\b(\w+)/(?=\s)", tree)) - {"tests", "conformance"} == folders
    words = re.split(r"[,:;\n]|\s{2,}", re.sub(r"\([^)]*\)|\w+://", "", tree))
    names = {word.strip() for word in words if re.fullmatch(r"\s*[a-z_0-9]+\s*", word)}
    assert names - folders - {file.stem for file in files} == set()


def test_every_setting_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `DATACACHE_([A-Z0-9_]+)`", text, re.MULTILINE)
    names = {field.name.upper() for field in fields(Settings)} - {"STORES", "DEFAULT_SSD_BYTES"}
    assert sorted(documented) == sorted(names | {"CONFIG", "DEBUG"})  # each once
