"""What the documents name exists: tests that hold promises, files, settings, benchmarks, links."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from datacache.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_PLACES = (ROOT, ROOT / "datacache", ROOT / "fuse_mount", ROOT / "tests")
"""Paths in the documents start at one of these."""


@cache
def names_of_tests(file: Path) -> frozenset[str]:
    """The names of the test functions in a file, methods of suites included."""
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def test_every_promise_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "SEMANTICS.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        path = next(p / file for p in (ROOT / "tests", ROOT / "datacache") if (p / file).is_file())
        assert test in names_of_tests(path), f"{file} has no {test}"


def test_every_row_of_a_promise_has_a_test() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "SEMANTICS.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| promise ")
    ]
    assert [row for row in rows if not re.search(r"`[\w/]+\.py(::test_\w+)?`", row)] == []


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    names = {name for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|sh))(?:::\w+)?`", text) if "*" not in name}
    places = [document.parent, *_PLACES, *(ROOT / "fuse_mount", ROOT / "datacache" / "tiers")]
    everywhere = {path.name for place in _PLACES for path in place.rglob("*.py")}
    missing = [
        name
        for name in sorted(names)
        if not any((place / name).is_file() for place in places) and not ("/" not in name and name in everywhere)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_setting_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `DATACACHE_([A-Z_]+)`", text, re.MULTILINE))
    names = {field.name.upper() for field in fields(Settings) if field.name != "stores"}
    assert documented == names | {"CONFIG", "DEBUG"}
