#!/usr/bin/env python3
"""Print the promises of docs/SEMANTICS.md that have all the words given, with their tests. One without a test fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.promises import marked, promised  # noqa: E402


def table(words: Sequence[str] = ()) -> str:
    """Return the promises that have all `words`, with sections and tests, a line each."""
    tests = marked()
    lines = ["# Promises and the tests that hold them"]
    chosen = [(p, s) for p, s in promised().items() if all(word.lower() in p.lower() for word in words)]
    for section, promises in groupby(chosen, key=lambda item: item[1]):
        lines += ["", f"## {section}", ""]
        for text, _ in promises:
            lines += [f"- {text}", *(f"    - `{test.removeprefix('tests/')}`" for test in tests.get(text, []))]
    return "\n".join(lines) + "\n"


def main() -> None:
    print(table(sys.argv[1:]), end="")
    if missing := promised().keys() ^ marked().keys():
        sys.exit("\n".join(["Promises without a test, and marks without a promise:", *sorted(missing)]))


if __name__ == "__main__":
    main()
