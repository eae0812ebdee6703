"""The list of problems, the code that uses it, and the document that explains it say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import datacache
from datacache.annotations.model import PROBLEMS, broken_image, quote, truncated_image, unusable_file
from datacache.core.errors import AnnotationError, BrokenImageError
from tests.test_docs import ROOT

DOCUMENT = ROOT / "docs" / "ANNOTATIONS.md"


def rows() -> list[list[str]]:
    """Return code, sentence, and what is done of each row of the document."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if re.match(r"\| `[a-z-]+` \|", line)]


def test_the_document_explains_every_problem_and_no_other() -> None:
    assert [len(row) for row in rows()] == [3] * len(rows())
    assert sorted((row[0].strip("`"), row[1]) for row in rows()) == sorted(PROBLEMS.items())


def test_every_problem_is_named_by_a_test() -> None:
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    sources = [
        text for text in (file.read_text(encoding="utf-8") for file in files) if re.search("|".join(PROBLEMS), text)
    ]
    trees = [ast.walk(ast.parse(text)) for text in sources]
    texts = {node.value for tree in trees for node in tree if isinstance(node, ast.Constant)}
    words = {word for text in texts if isinstance(text, str) for word in text.split()}
    assert {*PROBLEMS} - words == set()


def test_every_action_the_document_names_is_one() -> None:
    for code, _, done in rows():
        assert re.match(r"(repaired|skipped|noted|changed|an error)\b", done), code


def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the packages that name problems, with its file."""
    package = Path(datacache.__file__).parent
    return [
        (file.name, node)
        for folder in ("annotations", "conversion")
        for file in sorted((package / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_code_uses_every_problem_in_the_list_and_no_other() -> None:
    used = set()
    for file, call in calls():
        arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "code")]
        texts = {value.value for value in arguments if isinstance(value, ast.Constant) and isinstance(value.value, str)}
        used |= texts & set(PROBLEMS)
        reports = getattr(call.func, "attr", "") == "add" and len(call.args) >= 3  # `Problems.add`
        if (reports or getattr(call.func, "id", "") == "Problem") and isinstance(call.args[0], ast.Constant):
            assert call.args[0].value in PROBLEMS, file
        for keyword in call.keywords:
            if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                assert keyword.value.value in PROBLEMS, file
    assert set(PROBLEMS) - used <= {"label-spaces", "label-characters", "image-gone"}, (
        "only these are chosen at run time"
    )


def test_lines_for_files_and_images_that_cannot_be_used() -> None:
    error = AnnotationError("the XML is broken", code="xml-broken", file="a.xml", line=3)
    assert unusable_file(error) == ("xml-broken", "skipped", "a.xml", 3, "the XML is broken; the file is left out")
    assert unusable_file(error, "a.jpg").message == "the XML is broken; the file and 'a.jpg' are left out"
    assert broken_image("a.jpg", BrokenImageError("it is empty"))[:4] == ("image-broken", "skipped", "a.jpg", 0)
    assert truncated_image("a.jpg")[:4] == ("image-truncated", "skipped", "a.jpg", 0)


def test_quoted_values_are_short_and_on_one_line() -> None:
    assert quote("a\nb'") == '"a\\nb\'"'
    assert len(quote("x" * 1000)) == 60
