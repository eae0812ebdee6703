#!/usr/bin/env python3
"""Write docs/PROMISES.md: each promise of docs/SEMANTICS.md with the tests that hold it. --check only compares."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.promises import marked, promised  # noqa: E402


def table() -> str:
    """Return the document: a section for each section of SEMANTICS.md, a line for each promise and test."""
    tests = marked()
    lines = [
        "# Promises and the tests that hold them",
        "",
        "`scripts/promises.py` writes this page from [SEMANTICS.md](SEMANTICS.md) and the marks in `tests/`.",
    ]
    for section, promises in groupby(promised().items(), key=lambda item: item[1]):
        lines += ["", f"## {section}", ""]
        for text, _ in promises:
            lines += [f"- {text}", *(f"    - `{test.removeprefix('tests/')}`" for test in tests.get(text, []))]
    return "\n".join(lines) + "\n"


def main() -> None:
    page = ROOT / "docs" / "PROMISES.md"
    if "--check" not in sys.argv[1:]:
        page.write_text(table(), encoding="utf-8")
    elif page.read_text(encoding="utf-8") != table():
        sys.exit("docs/PROMISES.md is out of date: run scripts/promises.py")


if __name__ == "__main__":
    main()
