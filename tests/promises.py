"""Mark the tests that hold a promise of docs/SEMANTICS.md; find marks and promises for scripts and tests.

A mark repeats the promise's first sentence: `@promise("A size is a hard limit, the index counted")`. A module whose
tests hold one together says `pytestmark = [promise("…")]`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def promise(text: str) -> pytest.MarkDecorator:
    """Mark a test: it fails when the promise `text` is broken."""
    return pytest.mark.promise(text)


def promised() -> dict[str, str]:
    """Return the promises of docs/SEMANTICS.md in their order, each with the section it stands in."""
    document = (ROOT / "docs" / "SEMANTICS.md").read_text(encoding="utf-8")
    promises: dict[str, str] = {}
    for part in re.split(r"^##+ ", document, flags=re.MULTILINE)[1:]:
        section = part.splitlines()[0]
        for first in re.findall(r"^- (.+?)\.(?=\s|$)", part, re.MULTILINE | re.DOTALL):
            if section != "What is not promised?":
                promises[re.sub(r"\s+", " ", first)] = section
    return promises


def marked() -> dict[str, list[str]]:
    """Return the tests (`tests/…/test_x.py::test_y`) that are marked with each promise, without importing them."""
    tests: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for text, name in _marks(ast.parse(file.read_text(encoding="utf-8"))):
            tests.setdefault(text, []).append(f"{file.relative_to(ROOT)}{name}")
    return tests


def _marks(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((text, f"::{node.name}") for decorator in node.decorator_list for text in _texts(decorator))
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
        ):
            yield from ((text, "") for text in _texts(node.value))


def _texts(expression: ast.expr) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "promise":
            yield ast.literal_eval(node.args[0])
